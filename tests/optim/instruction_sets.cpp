// Runs every instruction set of the host kernels on the same numbers and compares all bits with those of plain C++.
//
//     rules x dtypes of gradient, state and parameter x sizes x threads      steps, sums of squares, passes over memory
//
// Prints the sets, how many results were compared, and a hash of them, which is the same on every architecture. Ends
// with 1 where bits differ. It is linked with csrc/ and needs no Python, so that it runs under an emulator too.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
const char* zeroshard_host_set(std::int32_t number);
std::int32_t zeroshard_host_step(std::int32_t set, std::int32_t rule, std::int32_t threads, std::int64_t numel,
                                 const float* scalars, float* master, const void* grad, std::int32_t grad_dtype,
                                 void* first, void* second, std::int32_t state_dtype, void* out,
                                 std::int32_t out_dtype);
std::int32_t zeroshard_host_squares(std::int32_t set, std::int32_t threads, std::int64_t numel, const void* grad,
                                    std::int32_t dtype, double* partial, double* total, std::int64_t* first_bad);
std::int32_t zeroshard_host_stream(std::int32_t set, std::int32_t threads, std::int64_t numel, float* a, float* b,
                                   float* c, float scale);
}

namespace {

enum : std::int32_t { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };
constexpr std::int32_t ADAM = 0, LION = 1, ADAGRAD = 2;
constexpr int STEPS = 3;

std::uint64_t random_state = 1;

std::uint32_t random_bits() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<std::uint32_t>(random_state >> 32);
}

std::size_t size_of(std::int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// Numbers of all magnitudes that the dtype has; now and then zeros of both signs, and with `wild` inf and NaN too.
void fill(std::vector<unsigned char>& bytes, std::int32_t dtype, bool wild, bool positive) {
  for (std::size_t at = 0; at < bytes.size(); at += size_of(dtype)) {
    std::uint32_t bits = random_bits();
    if (dtype == FLOAT32) {
      const std::uint32_t exponent = 100 + random_bits() % 40;
      bits = (bits & 0x807fffffu) | exponent << 23;
      if (random_bits() % 61 == 0) bits &= 0x80000000u;
      if (wild && random_bits() % 97 == 0) bits = (bits & 0x80000000u) | 0x7f800000u | (random_bits() % 2 << 22);
      if (positive) bits &= 0x7fffffffu;
      std::memcpy(&bytes[at], &bits, 4);
      continue;
    }
    std::uint16_t half = static_cast<std::uint16_t>(bits);
    if (dtype == BFLOAT16) half = static_cast<std::uint16_t>((half & 0x807fu) | (100 + random_bits() % 40) << 7);
    if (dtype == FLOAT16) half = static_cast<std::uint16_t>((half & 0x83ffu) | (random_bits() % 31) << 10);
    if (positive) half &= 0x7fffu;
    std::memcpy(&bytes[at], &half, 2);
  }
}

bool is_nan(const unsigned char* at, std::int32_t dtype) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, size_of(dtype));
  if (dtype == FLOAT32) return (bits & 0x7fffffffu) > 0x7f800000u;
  return dtype == BFLOAT16 ? (bits & 0x7fffu) > 0x7f80u : (bits & 0x7fffu) > 0x7c00u;
}

std::uint64_t hash = 1469598103934665603ull;
long compared = 0, different = 0;

// Which NaN it is depends on the processor; that it is one does not.
void compare(const std::vector<unsigned char>& ours, const std::vector<unsigned char>& plain, std::int32_t dtype,
             bool counts, const char* what) {
  for (std::size_t at = 0; at < plain.size(); at += size_of(dtype)) {
    const bool nan = is_nan(&plain[at], dtype);
    const bool same = nan ? is_nan(&ours[at], dtype) : std::memcmp(&ours[at], &plain[at], size_of(dtype)) == 0;
    if (!same && different++ < 10) std::printf("%s: element %zu differs\n", what, at / size_of(dtype));
    ++compared;
    for (std::size_t byte = 0; counts && byte < size_of(dtype); ++byte) {
      hash = (hash ^ (nan ? 0xffu : plain[at + byte])) * 1099511628211ull;
    }
  }
}

struct Memory {
  std::vector<unsigned char> master, grad, first, second, out;
};

void steps(int set, std::int32_t rule, std::int32_t threads, std::int64_t numel, Memory& m, std::int32_t grad,
           std::int32_t state, std::int32_t out) {
  const float adam[9] = {0.7f, 1e-3f, 1e-2f, 1.3f, 1e-8f, 0.1f, 0.999f, 0.001f, 1.0f};
  const float lion[9] = {0.7f, 1e-3f, 1e-2f, 0.9f, 0.1f, 0.99f, 0.01f, 0.0f, 0.0f};
  const float adagrad[9] = {0.7f, 1e-3f, 1e-2f, 1e-10f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const float* scalars = rule == ADAM ? adam : rule == LION ? lion : adagrad;
  for (int step = 0; step < STEPS; ++step) {
    const std::int32_t code = zeroshard_host_step(
        set, rule, threads, numel, scalars, reinterpret_cast<float*>(m.master.data()), m.grad.data(), grad,
        m.first.data(), rule == ADAM ? m.second.data() : nullptr, state, out == NONE ? nullptr : m.out.data(), out);
    if (code != 0) std::abort();
  }
}

void try_steps(int plain, std::int32_t rule, std::int64_t numel, std::int32_t grad, std::int32_t state,
               std::int32_t out, bool wild) {
  const std::size_t n = static_cast<std::size_t>(numel);
  Memory start{std::vector<unsigned char>(4 * n), std::vector<unsigned char>(n * size_of(grad)),
               std::vector<unsigned char>(n * size_of(state)), std::vector<unsigned char>(n * size_of(state)),
               std::vector<unsigned char>(out == NONE ? 0 : n * size_of(out))};
  fill(start.master, FLOAT32, false, false);
  fill(start.grad, grad, wild, false);
  fill(start.first, state, false, rule == ADAGRAD);
  fill(start.second, state, false, true);
  Memory expected = start;
  steps(plain, rule, 1, numel, expected, grad, state, out);
  for (int set = 0; set <= plain; ++set) {
    for (std::int32_t threads = 1; threads <= 3; threads += 2) {
      Memory ours = start;
      steps(set, rule, threads, numel, ours, grad, state, out);
      const char* name = zeroshard_host_set(set);
      const bool counts = set == 0 && threads == 1;
      compare(ours.master, expected.master, FLOAT32, counts, name);
      compare(ours.first, expected.first, state, counts, name);
      if (rule == ADAM) compare(ours.second, expected.second, state, counts, name);
      if (out != NONE) compare(ours.out, expected.out, out, counts, name);
    }
  }
}

void try_squares(int plain, std::int64_t numel, std::int32_t dtype, bool wild) {
  std::vector<unsigned char> grad(static_cast<std::size_t>(numel) * size_of(dtype));
  fill(grad, dtype, wild, false);
  std::vector<double> partial(static_cast<std::size_t>(numel / 16384 + 1));
  double expected = 0, total = 0;
  std::int64_t expected_bad = 0, bad = 0;
  zeroshard_host_squares(plain, 1, numel, grad.data(), dtype, partial.data(), &expected, &expected_bad);
  for (int set = 0; set <= plain; ++set) {
    zeroshard_host_squares(set, 3, numel, grad.data(), dtype, partial.data(), &total, &bad);
    const bool same = std::isnan(expected) ? std::isnan(total) : std::memcmp(&total, &expected, 8) == 0;
    compared += 2;
    if ((!same || bad != expected_bad) && different++ < 10) {
      std::printf("%s: squares %.17g and %.17g, first bad %lld and %lld\n", zeroshard_host_set(set), total, expected,
                  static_cast<long long>(bad), static_cast<long long>(expected_bad));
    }
  }
  if (!std::isnan(expected)) hash = (hash ^ static_cast<std::uint64_t>(expected_bad)) * 1099511628211ull;
}

void try_stream(int plain) {
  constexpr std::int64_t N = 1 << 15;
  float* a = static_cast<float*>(std::aligned_alloc(64, 3 * N * sizeof(float)));
  for (int set = 0; set <= plain; ++set) {
    for (std::int64_t i = 0; i < 3 * N; ++i) a[i] = static_cast<float>(i % 1000);
    if (zeroshard_host_stream(set, 2, N, a, a + N, a + 2 * N, 0.5f) != 0) std::abort();
    for (std::int64_t i = 0; i < N; ++i, ++compared) different += a[i] != a[N + i] + 0.5f * a[2 * N + i];
  }
  std::free(a);
}

}  // namespace

int main() {
  int plain = 0;
  std::printf("sets:");
  for (int set = 0; zeroshard_host_set(set) != nullptr; ++set, ++plain) std::printf(" %s", zeroshard_host_set(set));
  std::printf("\n");
  --plain;
  const std::int32_t dtypes[] = {FLOAT32, BFLOAT16, FLOAT16}, states[] = {FLOAT32, BFLOAT16};
  const std::int32_t outs[] = {NONE, FLOAT32, BFLOAT16, FLOAT16};
  for (const std::int64_t numel : {1ll, 31ll, 32ll, 257ll, 20011ll}) {
    for (std::int32_t rule = ADAM; rule <= ADAGRAD; ++rule) {
      for (const std::int32_t grad : dtypes) {
        for (const std::int32_t state : states) {
          for (const std::int32_t out : outs) try_steps(plain, rule, numel, grad, state, out, numel == 257);
        }
      }
    }
    for (const std::int32_t dtype : dtypes) {
      try_squares(plain, numel, dtype, false);
      try_squares(plain, numel, dtype, true);
    }
  }
  try_stream(plain);
  std::printf("compared %ld, different %ld, hash %016llx\n", compared, different,
              static_cast<unsigned long long>(hash));
  return different == 0 ? 0 : 1;
}
