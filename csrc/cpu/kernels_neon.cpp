// The kernels for 64-bit Arm: 4 elements a vector. Arm has no streaming store among its intrinsics; its processors
// detect a run of full-line writes by themselves.
#include <arm_neon.h>

#include "cpu/vector_kernels.h"

namespace megasetup::cpu {
namespace {

struct Memory {
  static constexpr size_t kLanes = 4;
  using Wide = uint32x4_t;
  using Low = uint16x4_t;
  // Byte loads carry no alignment promise, so memory of any alignment is legal.
  static Low load_low(const uint16_t* p) { return vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))); }
  static Wide load_wide(const float* p) { return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p))); }
  static void store_low(uint16_t* p, Low v) { vst1_u8(reinterpret_cast<uint8_t*>(p), vreinterpret_u8_u16(v)); }
  static void store_wide(float* p, Wide v) { vst1q_u8(reinterpret_cast<uint8_t*>(p), vreinterpretq_u8_u32(v)); }
  static void stream_wide(float* p, Wide v) { store_wide(p, v); }
  static void fence() {}

  static Wide nan_lanes(Wide v) { return vcgtq_u32(vandq_u32(v, vdupq_n_u32(0x7fffffffu)), vdupq_n_u32(0x7f800000u)); }
  static uint32_t mask_of(Wide lanes) {
    const Wide bits = {1u, 2u, 4u, 8u};
    return vaddvq_u32(vandq_u32(lanes, bits));
  }
  static uint32_t differing_wide(Wide a, Wide b) {
    const Wide both_nan = vandq_u32(nan_lanes(a), nan_lanes(b));
    return mask_of(vmvnq_u32(vorrq_u32(vceqq_u32(a, b), both_nan)));
  }
  static uint32_t differing_16_bit(Low a, Low b) { return mask_of(vmvnq_u32(vceqq_u32(vmovl_u16(a), vmovl_u16(b)))); }

  using Sums = uint64x2_t;
  static Wide extend(Low v) { return vmovl_u16(v); }
  static Wide load_keys(const uint32_t* p) { return vld1q_u32(p); }
  static Sums add_products(Sums sums, Wide patterns, Wide keys) {
    return vmlal_high_u32(vmlal_u32(sums, vget_low_u32(patterns), vget_low_u32(keys)), patterns, keys);
  }
  static uint64_t total(Sums sums) { return vaddvq_u64(sums); }
};

struct Bf16 : Memory {
  static Wide widen(Low v) { return vshll_n_u16(v, 16); }
  static Low narrow(Wide v) {
    const Wide odd = vandq_u32(vshrq_n_u32(v, 16), vdupq_n_u32(1));
    const Wide rounded = vshrq_n_u32(vaddq_u32(v, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const Wide quiet = vorrq_u32(vshrq_n_u32(v, 16), vdupq_n_u32(0x40));
    return vmovn_u32(vbslq_u32(nan_lanes(v), quiet, rounded));
  }
  static uint32_t differing_low(Low weight, Wide master) { return differing_16_bit(weight, narrow(master)); }
  static Wide dropping(Wide v) { return vtstq_u32(v, vdupq_n_u32(0xffff)); }
  static bool exact(Wide v) { return vmaxvq_u32(dropping(v)) == 0; }
  static Wide exact_patterns(Wide v) { return vshrq_n_u32(v, 16); }
  static uint32_t round(Wide v, Wide& patterns) {
    const Wide drops = dropping(v), nan = nan_lanes(v);
    const Wide top = vshrq_n_u32(v, 16);
    const Wide odd = vandq_u32(top, vdupq_n_u32(1));
    patterns = vshrq_n_u32(vaddq_u32(v, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    patterns = vbslq_u32(vandq_u32(drops, nan), vorrq_u32(top, vdupq_n_u32(0x40)), patterns);
    return mask_of(vbicq_u32(drops, nan));
  }
};

struct Fp16 : Memory {
  static Wide widen(Low v) { return vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(v))); }
  static Low narrow(Wide v) { return vreinterpret_u16_f16(vcvt_f16_f32(vreinterpretq_f32_u32(v))); }
  static uint32_t differing_low(Low weight, Wide master) { return differing_16_bit(weight, narrow(master)); }
  static uint32_t round(Wide v, Wide& patterns) {
    const Low low = narrow(v);
    patterns = extend(low);
    return mask_of(vmvnq_u32(vorrq_u32(vceqq_u32(widen(low), v), nan_lanes(v))));
  }
};

}  // namespace

const Kernels& neon_kernels() {
  static const Kernels table = vector_kernels<Bf16, Fp16>("neon");
  return table;
}

}  // namespace megasetup::cpu
