// The kernels in plain C++: what any processor runs, and what every other instruction set is tested against.
#include <cstring>

#include "common/floats.h"
#include "cpu/kernels.h"

namespace megasetup::cpu {
namespace {

// Memory of any alignment is read and written through memcpy, which compiles to one plain instruction.
template <typename T>
T load(const void* base, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(void* base, size_t index, T value) {
  std::memcpy(static_cast<char*>(base) + index * sizeof(T), &value, sizeof(T));
}

template <uint32_t (*kConvert)(uint16_t)>
void widen(const uint16_t* source, float* target, size_t count, bool) {
  for (size_t i = 0; i < count; ++i) store(target, i, kConvert(load<uint16_t>(source, i)));
}

template <uint16_t (*kConvert)(uint32_t)>
void narrow(const float* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) store(target, i, kConvert(load<uint32_t>(source, i)));
}

void note(Comparison& result, size_t index, bool exact_differs, bool rounded_differs) {
  if (exact_differs && result.exact_differences++ == 0) result.first_exact = static_cast<int64_t>(index);
  if (rounded_differs && result.rounded_differences++ == 0) result.first_rounded = static_cast<int64_t>(index);
}

template <uint32_t (*kWiden)(uint16_t), uint16_t (*kNarrow)(uint32_t)>
Comparison compare(const uint16_t* weight, const float* master, size_t count) {
  Comparison result;
  for (size_t i = 0; i < count; ++i) {
    const uint16_t low = load<uint16_t>(weight, i);
    const uint32_t wide = kWiden(low);
    const uint32_t high = load<uint32_t>(master, i);
    if (is_nan_bits(wide) && is_nan_bits(high)) continue;
    note(result, i, wide != high, kNarrow(high) != low);
  }
  return result;
}

void copy(const void* source, void* target, size_t bytes, bool) { std::memcpy(target, source, bytes); }

// What a vector that drops nothing keeps is a shift, of a NaN too: a signalling one then stays what it is.
uint16_t fp32_to_bf16_pattern(uint32_t bits) {
  return (bits & 0xffffu) == 0 ? static_cast<uint16_t>(bits >> 16) : fp32_to_bf16_bits(bits);
}

template <uint32_t (*kWiden)(uint16_t), uint16_t (*kNarrow)(uint32_t)>
Digest digest(const float* master, const uint32_t* keys, size_t count) {
  Digest result;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t high = load<uint32_t>(master, i);
    const uint16_t pattern = kNarrow(high);
    result.sum += static_cast<uint64_t>(keys[i]) * pattern;
    if (kWiden(pattern) == high || is_nan_bits(high)) continue;
    if (result.inexact++ == 0) result.first_inexact = static_cast<int64_t>(i);
  }
  return result;
}

uint64_t digest_16_bit(const uint16_t* patterns, const uint32_t* keys, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += static_cast<uint64_t>(keys[i]) * load<uint16_t>(patterns, i);
  return sum;
}

}  // namespace

Comparison compare_fp32(const float* weight, const float* master, size_t count) {
  Comparison result;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t low = load<uint32_t>(weight, i);
    const uint32_t high = load<uint32_t>(master, i);
    const bool differs = low != high && !(is_nan_bits(low) && is_nan_bits(high));
    if (differs) note(result, i, true, true);
  }
  return result;
}

Comparison compare_16_bit(const uint16_t* weight, const uint16_t* master, size_t count) {
  Comparison result;
  for (size_t i = 0; i < count; ++i) {
    if (load<uint16_t>(weight, i) != load<uint16_t>(master, i)) note(result, i, true, true);
  }
  return result;
}

const Kernels& scalar_kernels() {
  static const Kernels table{"scalar",
                             widen<bf16_to_fp32_bits>,
                             widen<fp16_to_fp32_bits>,
                             narrow<fp32_to_bf16_bits>,
                             narrow<fp32_to_fp16_bits>,
                             copy,
                             compare<bf16_to_fp32_bits, fp32_to_bf16_bits>,
                             compare<fp16_to_fp32_bits, fp32_to_fp16_bits>,
                             digest<bf16_to_fp32_bits, fp32_to_bf16_pattern>,
                             digest<fp16_to_fp32_bits, fp32_to_fp16_bits>,
                             digest_16_bit};
  return table;
}

}  // namespace megasetup::cpu
