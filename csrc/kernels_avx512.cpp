// AVX-512 (F, BW, DQ, VL): 16 lanes. bfloat16 is rounded with integers: the processor's own conversion, where it has
// one, takes denormal numbers for zero.
#include <immintrin.h>

#include "sweep.hpp"

namespace zeroshard {
namespace {

struct Avx512 {
  using F = __m512;
  using D = __m512d;
  static constexpr int WIDTH = 16;

  static F all(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F sign(F a) {
    const F zero = _mm512_setzero_ps();
    const F up = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(up, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
  }

  static F load(const float* from) { return _mm512_loadu_ps(from); }
  static F load(const bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F load(const fp16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static __m256i narrow(const bf16*, F a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static __m256i narrow(const fp16*, F a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static void store(float* to, F a) { _mm512_storeu_ps(to, a); }
  static void store(double* to, D a) { _mm512_storeu_pd(to, a); }
  template <class H>
  static void store(H* to, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(to, a));
  }
  // A multiple of 64 bytes to an aligned place, past the caches.
  static void stream(void* to, const void* from, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 64) {
      const __m512i line = _mm512_load_si512(static_cast<const char*>(from) + at);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + at), line);
    }
  }
  static void fence() { _mm_sfence(); }

  static D no_squares() { return _mm512_setzero_pd(); }
  static void add_squares(D* sums, F a) {
    const D low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const D high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    sums[0] = _mm512_add_pd(sums[0], _mm512_mul_pd(low, low));
    sums[1] = _mm512_add_pd(sums[1], _mm512_mul_pd(high, high));
  }
};

}  // namespace

extern const InstructionSet AVX512{"avx512", step<Avx512>, squares<Avx512>, stream<Avx512>};

}  // namespace zeroshard
