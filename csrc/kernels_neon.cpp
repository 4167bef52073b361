// NEON of AArch64, which always has it, with conversions of float16: 4 lanes.
#include <arm_neon.h>

#include "sweep.hpp"

namespace zeroshard {
namespace {

struct Neon {
  using F = float32x4_t;
  using D = float64x2_t;
  static constexpr int WIDTH = 4;

  static F all(float x) { return vdupq_n_f32(x); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F sqrt(F a) { return vsqrtq_f32(a); }
  static F sign(F a) {
    const uint32x4_t up = vandq_u32(vcgtzq_f32(a), vreinterpretq_u32_f32(vdupq_n_f32(1.0f)));
    const uint32x4_t down = vandq_u32(vcltzq_f32(a), vreinterpretq_u32_f32(vdupq_n_f32(-1.0f)));
    return vreinterpretq_f32_u32(vorrq_u32(up, down));
  }

  static F load(const float* from) { return vld1q_f32(from); }
  static F load(const bf16* from) {
    const uint16x4_t bits = vld1_u16(reinterpret_cast<const std::uint16_t*>(from));
    return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
  }
  static F load(const fp16* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from))));
  }

  static uint16x4_t narrow(const bf16*, F a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc00000)), 16);
  }
  static uint16x4_t narrow(const fp16*, F a) { return vreinterpret_u16_f16(vcvt_f16_f32(a)); }

  static void store(float* to, F a) { vst1q_f32(to, a); }
  static void store(double* to, D a) { vst1q_f64(to, a); }
  template <class H>
  static void store(H* to, F a) {
    vst1_u16(reinterpret_cast<std::uint16_t*>(to), narrow(to, a));
  }
  // Whole lines that are written in one go are not read first on these processors; there is no store past the caches.
  static void stream(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
  static void fence() {}

  static D no_squares() { return vdupq_n_f64(0.0); }
  static void add_squares(D* sums, F a) {
    const D low = vcvt_f64_f32(vget_low_f32(a));
    const D high = vcvt_high_f64_f32(a);
    sums[0] = vaddq_f64(sums[0], vmulq_f64(low, low));
    sums[1] = vaddq_f64(sums[1], vmulq_f64(high, high));
  }
};

}  // namespace

extern const InstructionSet NEON{"neon", step<Neon>, squares<Neon>, stream<Neon>};

}  // namespace zeroshard
