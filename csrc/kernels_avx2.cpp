// AVX2 and F16C: 8 lanes.
#include <immintrin.h>

#include "sweep.hpp"

namespace zeroshard {
namespace {

struct Avx2 {
  using F = __m256;
  using D = __m256d;
  static constexpr int WIDTH = 8;

  static F all(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F sign(F a) {
    const F zero = _mm256_setzero_ps();
    const F up = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0f));
    return _mm256_or_ps(up, _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_LT_OQ), _mm256_set1_ps(-1.0f)));
  }

  static F load(const float* from) { return _mm256_loadu_ps(from); }
  static F load(const bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const fp16* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }

  static __m128i narrow(const bf16*, F a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
  }
  static __m128i narrow(const fp16*, F a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static void store(float* to, F a) { _mm256_storeu_ps(to, a); }
  static void store(double* to, D a) { _mm256_storeu_pd(to, a); }
  template <class H>
  static void store(H* to, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(to, a));
  }
  // A multiple of 32 bytes to an aligned place, past the caches.
  static void stream(void* to, const void* from, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 32) {
      const __m256i half = _mm256_load_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + at));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + at), half);
    }
  }
  static void fence() { _mm_sfence(); }

  static D no_squares() { return _mm256_setzero_pd(); }
  static void add_squares(D* sums, F a) {
    const D low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    const D high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    sums[0] = _mm256_add_pd(sums[0], _mm256_mul_pd(low, low));
    sums[1] = _mm256_add_pd(sums[1], _mm256_mul_pd(high, high));
  }
};

}  // namespace

extern const InstructionSet AVX2{"avx2", step<Avx2>, squares<Avx2>, stream<Avx2>};

}  // namespace zeroshard
