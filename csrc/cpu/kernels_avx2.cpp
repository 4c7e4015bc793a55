// The kernels for AVX2 with F16C: 8 elements a vector.
#include <immintrin.h>

#include <array>
#include <numeric>

#include "cpu/vector_kernels.h"

namespace megasetup::cpu {
namespace {

struct Memory {
  static constexpr size_t kLanes = 8;
  using Wide = __m256i;
  using Low = __m128i;
  static Low load_low(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static Wide load_wide(const float* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_low(uint16_t* p, Low v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
  static void store_wide(float* p, Wide v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static void stream_wide(float* p, Wide v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
  static void fence() { _mm_sfence(); }

  static Wide nan_lanes(Wide v) {
    const __m256 f = _mm256_castsi256_ps(v);
    return _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
  }
  static uint32_t lanes_that_are_not(Wide same) {
    return ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) & 0xffu;
  }
  static uint32_t differing_wide(Wide a, Wide b) {
    const Wide both_nan = _mm256_and_si256(nan_lanes(a), nan_lanes(b));
    return lanes_that_are_not(_mm256_or_si256(_mm256_cmpeq_epi32(a, b), both_nan));
  }
  static uint32_t differing_16_bit(Low a, Low b) {
    return lanes_that_are_not(_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(a, b)));
  }

  using Sums = __m256i;
  static Wide extend(Low v) { return _mm256_cvtepu16_epi32(v); }
  static Wide load_keys(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Sums add_products(Sums sums, Wide patterns, Wide keys) {
    const Wide odd = _mm256_mul_epu32(_mm256_srli_epi64(patterns, 32), _mm256_srli_epi64(keys, 32));
    return _mm256_add_epi64(sums, _mm256_add_epi64(_mm256_mul_epu32(patterns, keys), odd));
  }
  static uint64_t total(Sums sums) {
    alignas(32) std::array<uint64_t, 4> lanes;
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.data()), sums);
    return std::accumulate(lanes.begin(), lanes.end(), uint64_t{0});
  }
};

struct Bf16 : Memory {
  static Wide widen(Low v) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16); }
  static Low narrow(Wide v) {
    const Wide odd = _mm256_and_si256(_mm256_srli_epi32(v, 16), _mm256_set1_epi32(1));
    Wide rounded = _mm256_srli_epi32(_mm256_add_epi32(v, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const Wide quiet = _mm256_or_si256(_mm256_srli_epi32(v, 16), _mm256_set1_epi32(0x40));
    rounded = _mm256_blendv_epi8(rounded, quiet, nan_lanes(v));
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  static uint32_t differing_low(Low weight, Wide master) { return differing_16_bit(weight, narrow(master)); }
  static bool exact(Wide v) { return _mm256_testz_si256(v, _mm256_set1_epi32(0xffff)) != 0; }
  static Wide exact_patterns(Wide v) { return _mm256_srli_epi32(v, 16); }
  static uint32_t round(Wide v, Wide& patterns) {
    const Wide kept = _mm256_cmpeq_epi32(_mm256_slli_epi32(v, 16), _mm256_setzero_si256());
    const Wide nan = nan_lanes(v);
    const Wide top = _mm256_srli_epi32(v, 16);
    const Wide odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    patterns = _mm256_srli_epi32(_mm256_add_epi32(v, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const Wide quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    patterns = _mm256_blendv_epi8(patterns, quiet, _mm256_andnot_si256(kept, nan));
    return lanes_that_are_not(_mm256_or_si256(kept, nan));
  }
};

struct Fp16 : Memory {
  static Wide widen(Low v) { return _mm256_castps_si256(_mm256_cvtph_ps(v)); }
  static Low narrow(Wide v) {
    return _mm256_cvtps_ph(_mm256_castsi256_ps(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static uint32_t differing_low(Low weight, Wide master) { return differing_16_bit(weight, narrow(master)); }
  static uint32_t round(Wide v, Wide& patterns) {
    const Low low = narrow(v);
    patterns = extend(low);
    return lanes_that_are_not(_mm256_or_si256(_mm256_cmpeq_epi32(widen(low), v), nan_lanes(v)));
  }
};

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels table = vector_kernels<Bf16, Fp16>("avx2");
  return table;
}

}  // namespace megasetup::cpu
