// Any processor: one lane, in the C++ language alone. What the others are held to.
#include <cmath>
#include <cstring>

#include "sweep.hpp"

namespace zeroshard {
namespace {

inline std::uint32_t bits_of(float a) {
  std::uint32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float a;
  std::memcpy(&a, &bits, sizeof a);
  return a;
}

// float16 has 5 bits of exponent (bias 15) and 10 of mantissa; float32 8 (bias 127) and 23.
inline float widen(fp16 a) {
  const std::uint32_t sign = (a.bits & 0x8000u) << 16, exponent = (a.bits >> 10) & 0x1fu, mantissa = a.bits & 0x3ffu;
  if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float small = static_cast<float>(mantissa) * 0x1p-24f;  // exact
  return float_of(sign | bits_of(small));
}

inline fp16 narrow_fp16(float a) {
  const std::uint32_t bits = bits_of(a), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  std::uint32_t half;
  if (size > 0x7f800000u) {
    half = 0x7e00u;
  } else if (size >= 0x477ff000u) {  // 65520 and more round to infinity
    half = 0x7c00u;
  } else if (size >= 0x38800000u) {  // normal: drop 13 bits, ties to even; a carry goes into the exponent
    half = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  } else {  // denormal: a sum with a number whose last place is 2**-24 rounds as is needed
    half = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

inline bf16 narrow_bf16(float a) {
  const std::uint32_t bits = bits_of(a);
  if (a != a) return {0x7fc0};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

struct Plain {
  using F = float;
  using D = double;
  static constexpr int WIDTH = 1;

  static F all(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return std::sqrt(a); }
  static F sign(F a) { return static_cast<F>(a > 0.0f) - static_cast<F>(a < 0.0f); }

  static F load(const float* from) { return *from; }
  static F load(const bf16* from) { return float_of(static_cast<std::uint32_t>(from->bits) << 16); }
  static F load(const fp16* from) { return widen(*from); }
  static void store(float* to, F a) { *to = a; }
  static void store(double* to, D a) { *to = a; }
  static void store(bf16* to, F a) { *to = narrow_bf16(a); }
  static void store(fp16* to, F a) { *to = narrow_fp16(a); }
  static void stream(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
  static void fence() {}

  static D no_squares() { return 0.0; }
  static void add_squares(D* sums, F a) { sums[0] += static_cast<D>(a) * static_cast<D>(a); }
};

}  // namespace

extern const InstructionSet PLAIN{"plain", step<Plain>, squares<Plain>, stream<Plain>};

}  // namespace zeroshard
