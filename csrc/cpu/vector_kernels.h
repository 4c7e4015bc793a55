// The loops that every vector instruction set shares: peel to the target's alignment, run whole vectors, finish by the
// scalar kernels. An instruction set supplies a Vector type that says how one vector is loaded, converted and stored.
//
// A Vector V has: V::kLanes (elements of FP32 in one vector); Wide (FP32 bits in a register) and Low (the same number
// of 16-bit values); load_low/load_wide/store_low/store_wide for any alignment; stream_wide for aligned addresses;
// fence(); widen(Low) and narrow(Wide) for the dtype; differing_wide/differing_low, which give a bit mask of lanes that
// differ, leaving out lanes where both sides are NaN. For digests: extend(Low) to 32-bit lanes; round(Wide, Wide&
// patterns), which gives the narrowed patterns in 32-bit lanes, and the mask of lanes that rounding changes, NaNs left
// out; where it is cheaper to see that narrowing drops nothing, exact(Wide) for that and exact_patterns(Wide) for the
// patterns then; Sums (64-bit lanes), with load_keys, add_products and total.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/kernels.h"

namespace megasetup::cpu {

// (static: each instruction set's file must keep its own copy, or the linker could give one file another's
// instructions.) Elements before `address` reaches a multiple of `alignment`, or `count` when it never does.
static inline size_t elements_to_alignment(const float* address, size_t alignment, size_t count) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  if (value % sizeof(float) != 0) return count;
  const size_t elements = (alignment - value % alignment) % alignment / sizeof(float);
  return elements < count ? elements : count;
}

// How far ahead of the reading memory is asked for: 4 KB of a source, 8 KB of a master.
constexpr size_t kPrefetchElements = 2048;

template <typename V>
void widen_loop(const uint16_t* source, float* target, size_t count, bool stream,
                void (*scalar)(const uint16_t*, float*, size_t, bool)) {
  size_t i = 0;
  const size_t head = elements_to_alignment(target, sizeof(typename V::Wide), count);
  if (stream && head < count) {
    scalar(source, target, head, false);
    i = head;
    for (; i + 4 * V::kLanes <= count; i += 4 * V::kLanes) {
      // The processor's own prefetcher falls behind when stores take most of the bandwidth: 5 to 10% on one core.
      __builtin_prefetch(source + i + kPrefetchElements);
      if constexpr (V::kLanes > 8) __builtin_prefetch(source + i + kPrefetchElements + 2 * V::kLanes);
      for (size_t k = 0; k < 4; ++k) {
        V::stream_wide(target + i + k * V::kLanes, V::widen(V::load_low(source + i + k * V::kLanes)));
      }
    }
    V::fence();
  }
  for (; i + V::kLanes <= count; i += V::kLanes) V::store_wide(target + i, V::widen(V::load_low(source + i)));
  scalar(source + i, target + i, count - i, false);
}

template <typename V>
void narrow_loop(const float* source, uint16_t* target, size_t count, void (*scalar)(const float*, uint16_t*, size_t)) {
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store_low(target + i, V::narrow(V::load_wide(source + i)));
  scalar(source + i, target + i, count - i);
}

template <typename V>
Comparison compare_loop(const uint16_t* weight, const float* master, size_t count,
                        Comparison (*scalar)(const uint16_t*, const float*, size_t)) {
  Comparison result;
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    // Into the second-level cache: eight Xeon cores read masters 20% faster than with their own prefetchers alone.
    __builtin_prefetch(master + i + kPrefetchElements, 0, 2);
    const auto low = V::load_low(weight + i);
    const auto high = V::load_wide(master + i);
    const uint32_t exact = V::differing_wide(V::widen(low), high);
    // A master that equals the widened weight also rounds to it, so a healthy run of memory stops here.
    if (exact == 0) continue;
    const uint32_t rounded = V::differing_low(low, high) & exact;
    if (result.exact_differences == 0) result.first_exact = static_cast<int64_t>(i) + std::countr_zero(exact);
    if (result.rounded_differences == 0 && rounded != 0) {
      result.first_rounded = static_cast<int64_t>(i) + std::countr_zero(rounded);
    }
    result.exact_differences += std::popcount(exact);
    result.rounded_differences += std::popcount(rounded);
  }
  const Comparison rest = scalar(weight + i, master + i, count - i);
  if (result.exact_differences == 0 && rest.exact_differences != 0) {
    result.first_exact = static_cast<int64_t>(i) + rest.first_exact;
  }
  if (result.rounded_differences == 0 && rest.rounded_differences != 0) {
    result.first_rounded = static_cast<int64_t>(i) + rest.first_rounded;
  }
  result.exact_differences += rest.exact_differences;
  result.rounded_differences += rest.rounded_differences;
  return result;
}

template <typename V>
Digest digest_loop(const float* master, const uint32_t* keys, size_t count,
                   Digest (*scalar)(const float*, const uint32_t*, size_t)) {
  Digest result;
  typename V::Sums sums{};
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    __builtin_prefetch(master + i + kPrefetchElements, 0, 2);
    const auto high = V::load_wide(master + i);
    if constexpr (requires { V::exact(high); }) {
      if (V::exact(high)) {
        sums = V::add_products(sums, V::exact_patterns(high), V::load_keys(keys + i));
        continue;
      }
    }
    typename V::Wide patterns;
    const uint32_t inexact = V::round(high, patterns);
    sums = V::add_products(sums, patterns, V::load_keys(keys + i));
    if (inexact == 0) continue;
    if (result.inexact == 0) result.first_inexact = static_cast<int64_t>(i) + std::countr_zero(inexact);
    result.inexact += std::popcount(inexact);
  }
  const Digest rest = scalar(master + i, keys + i, count - i);
  if (result.inexact == 0 && rest.inexact != 0) result.first_inexact = static_cast<int64_t>(i) + rest.first_inexact;
  result.inexact += rest.inexact;
  result.sum = V::total(sums) + rest.sum;
  return result;
}

template <typename V>
uint64_t digest_16_bit_loop(const uint16_t* patterns, const uint32_t* keys, size_t count,
                            uint64_t (*scalar)(const uint16_t*, const uint32_t*, size_t)) {
  typename V::Sums sums{};
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    __builtin_prefetch(patterns + i + kPrefetchElements, 0, 2);
    sums = V::add_products(sums, V::extend(V::load_low(patterns + i)), V::load_keys(keys + i));
  }
  return V::total(sums) + scalar(patterns + i, keys + i, count - i);
}

template <typename V>
void copy_loop(const void* source, void* target, size_t bytes, bool stream,
               void (*scalar)(const void*, void*, size_t, bool)) {
  const auto* from = static_cast<const char*>(source);
  auto* to = static_cast<char*>(target);
  constexpr size_t kStep = sizeof(typename V::Wide);
  const size_t head = (kStep - reinterpret_cast<uintptr_t>(to) % kStep) % kStep;
  if (!stream || bytes < head + kStep) {
    scalar(source, target, bytes, false);
    return;
  }
  scalar(from, to, head, false);
  size_t i = head;
  for (; i + kStep <= bytes; i += kStep) {
    V::stream_wide(reinterpret_cast<float*>(to + i), V::load_wide(reinterpret_cast<const float*>(from + i)));
  }
  V::fence();
  scalar(from + i, to + i, bytes - i, false);
}

// The table for an instruction set, from its BF16 and FP16 vectors.
template <typename Bf16, typename Fp16>
Kernels vector_kernels(const char* name) {
  return Kernels{
      name,
      [](const uint16_t* source, float* target, size_t count, bool stream) {
        widen_loop<Bf16>(source, target, count, stream, scalar_kernels().widen_bf16);
      },
      [](const uint16_t* source, float* target, size_t count, bool stream) {
        widen_loop<Fp16>(source, target, count, stream, scalar_kernels().widen_fp16);
      },
      [](const float* source, uint16_t* target, size_t count) {
        narrow_loop<Bf16>(source, target, count, scalar_kernels().narrow_bf16);
      },
      [](const float* source, uint16_t* target, size_t count) {
        narrow_loop<Fp16>(source, target, count, scalar_kernels().narrow_fp16);
      },
      [](const void* source, void* target, size_t bytes, bool stream) {
        copy_loop<Bf16>(source, target, bytes, stream, scalar_kernels().copy);
      },
      [](const uint16_t* weight, const float* master, size_t count) {
        return compare_loop<Bf16>(weight, master, count, scalar_kernels().compare_bf16);
      },
      [](const uint16_t* weight, const float* master, size_t count) {
        return compare_loop<Fp16>(weight, master, count, scalar_kernels().compare_fp16);
      },
      [](const float* master, const uint32_t* keys, size_t count) {
        return digest_loop<Bf16>(master, keys, count, scalar_kernels().digest_bf16);
      },
      [](const float* master, const uint32_t* keys, size_t count) {
        return digest_loop<Fp16>(master, keys, count, scalar_kernels().digest_fp16);
      },
      [](const uint16_t* patterns, const uint32_t* keys, size_t count) {
        return digest_16_bit_loop<Bf16>(patterns, keys, count, scalar_kernels().digest_16_bit);
      },
  };
}

}  // namespace megasetup::cpu
