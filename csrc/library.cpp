// The C functions that Python calls (zeroshard/optim/host/native.py), and the choice of an instruction set.
//
// A plain C interface, loaded with ctypes: the few calls take addresses and sizes that Python has checked. It needs no
// header of Python or torch, so one file serves every version of both, and it is built where nothing but a compiler is;
// ctypes lets other Python threads run meanwhile. Rejected: nanobind, which would be needed at installation and ties the
// file to a version of Python, for a call of some microseconds less in a step of milliseconds.
#include <cmath>
#include <cstdint>

#include "job.hpp"
#include "pool.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define ZEROSHARD_API extern "C" __attribute__((visibility("default")))

namespace zeroshard {

extern const InstructionSet PLAIN;
#if defined(__x86_64__)
extern const InstructionSet AVX2;
extern const InstructionSet AVX512;
#elif defined(__aarch64__)
extern const InstructionSet NEON;
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
  return f16c && __builtin_cpu_supports("avx2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The sets that this processor has, best first; null after the last.
const InstructionSet* set_at(std::int32_t number) {
  const InstructionSet* found[4] = {};
  int count = 0;
#if defined(__x86_64__)
  if (has_avx512()) found[count++] = &AVX512;
  if (has_avx2()) found[count++] = &AVX2;
#elif defined(__aarch64__)
  found[count++] = &NEON;
#endif
  found[count++] = &PLAIN;
  return number >= 0 && number < count ? found[number] : nullptr;
}

// Pieces large enough that handing one out costs nothing, small enough that threads end together.
constexpr std::int64_t LARGEST_PIECE = 1 << 17, SMALLEST_PIECE = 1 << 13;

std::int64_t piece_of(std::int64_t numel, std::int32_t threads) {
  std::int64_t piece = numel / (8 * static_cast<std::int64_t>(threads)) / 1024 * 1024;
  if (piece > LARGEST_PIECE) piece = LARGEST_PIECE;
  return piece < SMALLEST_PIECE ? SMALLEST_PIECE : piece;
}

// Below, the parameter that was written may still be in the cache when it is read; above it can't be.
constexpr std::int64_t STREAM_FROM = 1 << 20;

struct StepCall {
  const InstructionSet* set;
  Job job;
};

void step_piece(const void* call, std::int64_t begin, std::int64_t end) {
  const auto& step = *static_cast<const StepCall*>(call);
  step.set->step(step.job, begin, end);
}

struct SquaresCall {
  const InstructionSet* set;
  SquaresJob job;
};

void squares_piece(const void* call, std::int64_t begin, std::int64_t end) {
  const auto& squares = *static_cast<const SquaresCall*>(call);
  squares.set->squares(squares.job, begin, end);
}

struct StreamCall {
  const InstructionSet* set;
  StreamJob job;
};

void stream_piece(const void* call, std::int64_t begin, std::int64_t end) {
  const auto& stream = *static_cast<const StreamCall*>(call);
  stream.set->stream(stream.job, begin, end);
}

bool finite_at(const void* grad, std::int32_t dtype, std::int64_t index) {
  switch (dtype) {
    case FLOAT32: return std::isfinite(static_cast<const float*>(grad)[index]);
    case BFLOAT16: return (static_cast<const bf16*>(grad)[index].bits & 0x7f80u) != 0x7f80u;
    default: return (static_cast<const fp16*>(grad)[index].bits & 0x7c00u) != 0x7c00u;
  }
}

}  // namespace
}  // namespace zeroshard

// Changes with the functions below; Python refuses another.
ZEROSHARD_API std::int32_t zeroshard_host_version() { return 2; }

// Name of an instruction set that this processor has, best first; null after the last.
ZEROSHARD_API const char* zeroshard_host_set(std::int32_t number) {
  const zeroshard::InstructionSet* set = zeroshard::set_at(number);
  return set == nullptr ? nullptr : set->name;
}

// One optimizer step; dtypes and scalars as in job.hpp. 0, or -1 for arguments without meaning.
ZEROSHARD_API std::int32_t zeroshard_host_step(std::int32_t set, std::int32_t rule, std::int32_t threads,
                                               std::int64_t numel, const float* scalars, float* master,
                                               const void* grad, std::int32_t grad_dtype, void* first, void* second,
                                               std::int32_t state_dtype, void* out, std::int32_t out_dtype) {
  using namespace zeroshard;
  StepCall call{set_at(set), {}};
  if (call.set == nullptr || threads < 1 || numel < 0) return -1;
  Job& job = call.job;
  job.rule = rule;
  job.grad_dtype = grad_dtype;
  job.state_dtype = state_dtype;
  job.out_dtype = out_dtype;
  for (int k = 0; k < 9; ++k) job.scalars[k] = scalars[k];
  job.master = master;
  job.grad = grad;
  job.state[0] = first;
  job.state[1] = second;
  job.out = out;
  // Where the parameter takes the gradient's place its lines are in the cache already.
  job.stream = numel >= STREAM_FROM && out != grad && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
  job.numel = numel;
  run_pieces(threads, numel, piece_of(numel, threads), step_piece, &call);
  return 0;
}

// The sum of squares and the first element that is not finite (-1: none); `partial` has room for each 16384 elements.
ZEROSHARD_API std::int32_t zeroshard_host_squares(std::int32_t set, std::int32_t threads, std::int64_t numel,
                                                  const void* grad, std::int32_t dtype, double* partial,
                                                  double* total, std::int64_t* first_bad) {
  using namespace zeroshard;
  const SquaresCall call{set_at(set), {dtype, grad, partial, numel}};
  if (call.set == nullptr || threads < 1 || numel < 0) return -1;
  const std::int64_t blocks = (numel + SQUARES_BLOCK - 1) / SQUARES_BLOCK;
  run_pieces(threads, blocks, 8, squares_piece, &call);
  *total = 0.0;
  *first_bad = -1;
  for (std::int64_t block = 0; block < blocks; ++block) {
    *total += partial[block];
    if (*first_bad < 0 && !std::isfinite(partial[block])) {
      *first_bad = block * SQUARES_BLOCK;
      while (*first_bad < numel - 1 && finite_at(grad, dtype, *first_bad)) ++*first_bad;
    }
  }
  return 0;
}

// A pass over memory with next to no arithmetic, see StreamJob; -1 for addresses or sizes that are not aligned.
ZEROSHARD_API std::int32_t zeroshard_host_stream(std::int32_t set, std::int32_t threads, std::int64_t numel, float* a,
                                                 float* b, float* c, float scale) {
  using namespace zeroshard;
  const StreamCall call{set_at(set), {a, b, c, scale, numel}};
  const std::uintptr_t addresses =
      reinterpret_cast<std::uintptr_t>(a) | reinterpret_cast<std::uintptr_t>(b) | reinterpret_cast<std::uintptr_t>(c);
  if (call.set == nullptr || threads < 1 || numel < 0 || numel % GROUP != 0 || addresses % 64 != 0) return -1;
  run_pieces(threads, numel, piece_of(numel, threads), stream_piece, &call);
  return 0;
}
