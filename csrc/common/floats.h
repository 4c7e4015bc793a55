// The conversions on single bit patterns, in integer arithmetic, for host and device alike: so that a NaN, whose
// payload every instruction set treats in its own way, comes out the same everywhere.
#pragma once

#include <cstdint>

#include "common/qualifiers.h"

namespace megasetup {

MEGASETUP_BOTH bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

MEGASETUP_BOTH uint32_t bf16_to_fp32_bits(uint16_t value) { return static_cast<uint32_t>(value) << 16; }

// Round to nearest even. A NaN keeps its sign and the top of its payload, and becomes quiet.
MEGASETUP_BOTH uint16_t fp32_to_bf16_bits(uint32_t bits) {
  if (is_nan_bits(bits)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact. A NaN keeps its sign and payload, and becomes quiet (as the processors' own instructions have it).
MEGASETUP_BOTH uint32_t fp16_to_fp32_bits(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  uint32_t exponent = (value >> 10) & 0x1fu;
  uint32_t mantissa = value & 0x3ffu;
  if (exponent == 0x1fu) {
    return sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
  }
  if (exponent == 0) {
    if (mantissa == 0) return sign;
    // A subnormal is normal in FP32: shift until the leading one stands where the hidden bit belongs.
    exponent = 1;
    while (!(mantissa & 0x400u)) {
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 0x3ffu;
  }
  return sign | ((exponent + 112u) << 23) | (mantissa << 13);
}

// Round to nearest even, overflow to infinity. A NaN keeps its sign and the top of its payload, and becomes quiet.
MEGASETUP_BOTH uint16_t fp32_to_fp16_bits(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504, or is infinite
  if (magnitude >= 0x38800000u) {                                              // a normal FP16 number
    const uint32_t rebiased = magnitude - (112u << 23);
    return static_cast<uint16_t>(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // less than half the smallest subnormal
  const uint32_t shift = 126u - (magnitude >> 23);                  // 14 to 24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  return static_cast<uint16_t>(sign | (kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u)));
}

}  // namespace megasetup
