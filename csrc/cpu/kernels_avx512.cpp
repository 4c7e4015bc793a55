// The kernels for AVX-512 (F, BW, VL): 16 elements a vector.
#include <immintrin.h>

#include <array>
#include <numeric>

#include "cpu/vector_kernels.h"

namespace megasetup::cpu {
namespace {

struct Memory {
  static constexpr size_t kLanes = 16;
  using Wide = __m512i;
  using Low = __m256i;
  static Low load_low(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Wide load_wide(const float* p) { return _mm512_loadu_si512(p); }
  static void store_low(uint16_t* p, Low v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static void store_wide(float* p, Wide v) { _mm512_storeu_si512(p, v); }
  static void stream_wide(float* p, Wide v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
  static void fence() { _mm_sfence(); }

  static __mmask16 nan_lanes(Wide v) {
    const __m512 f = _mm512_castsi512_ps(v);
    return _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
  }
  static uint32_t differing_wide(Wide a, Wide b) {
    const __mmask16 differs = _mm512_cmpneq_epi32_mask(a, b);
    return differs & ~(nan_lanes(a) & nan_lanes(b)) & 0xffffu;
  }

  using Sums = __m512i;
  static Wide extend(Low v) { return _mm512_cvtepu16_epi32(v); }
  static Wide load_keys(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Sums add_products(Sums sums, Wide patterns, Wide keys) {
    const Wide odd = _mm512_mul_epu32(_mm512_srli_epi64(patterns, 32), _mm512_srli_epi64(keys, 32));
    return _mm512_add_epi64(sums, _mm512_add_epi64(_mm512_mul_epu32(patterns, keys), odd));
  }
  static uint64_t total(Sums sums) {
    alignas(64) std::array<uint64_t, 8> lanes;
    _mm512_store_si512(lanes.data(), sums);
    return std::accumulate(lanes.begin(), lanes.end(), uint64_t{0});
  }
};

struct Bf16 : Memory {
  static Wide widen(Low v) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); }
  static Low narrow(Wide v) {
    const Wide odd = _mm512_and_si512(_mm512_srli_epi32(v, 16), _mm512_set1_epi32(1));
    Wide rounded = _mm512_srli_epi32(_mm512_add_epi32(v, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const Wide quiet = _mm512_or_si512(_mm512_srli_epi32(v, 16), _mm512_set1_epi32(0x40));
    rounded = _mm512_mask_mov_epi32(rounded, nan_lanes(v), quiet);
    return _mm512_cvtepi32_epi16(rounded);
  }
  static uint32_t differing_low(Low weight, Wide master) { return _mm256_cmpneq_epi16_mask(weight, narrow(master)); }
  static __mmask16 dropping(Wide v) { return _mm512_test_epi32_mask(v, _mm512_set1_epi32(0xffff)); }
  static bool exact(Wide v) { return dropping(v) == 0; }
  static Wide exact_patterns(Wide v) { return _mm512_srli_epi32(v, 16); }
  static uint32_t round(Wide v, Wide& patterns) {
    const __mmask16 drops = dropping(v), nan = nan_lanes(v);
    const Wide top = _mm512_srli_epi32(v, 16);
    const Wide odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    patterns = _mm512_srli_epi32(_mm512_add_epi32(v, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    patterns = _mm512_mask_or_epi32(patterns, drops & nan, top, _mm512_set1_epi32(0x40));
    return drops & ~nan & 0xffffu;
  }
};

struct Fp16 : Memory {
  static Wide widen(Low v) { return _mm512_castps_si512(_mm512_cvtph_ps(v)); }
  static Low narrow(Wide v) {
    return _mm512_cvtps_ph(_mm512_castsi512_ps(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static uint32_t differing_low(Low weight, Wide master) { return _mm256_cmpneq_epi16_mask(weight, narrow(master)); }
  static uint32_t round(Wide v, Wide& patterns) {
    const Low low = narrow(v);
    patterns = extend(low);
    return _mm512_cmpneq_epi32_mask(widen(low), v) & ~nan_lanes(v) & 0xffffu;
  }
};

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels table = vector_kernels<Bf16, Fp16>("avx512");
  return table;
}

}  // namespace megasetup::cpu
