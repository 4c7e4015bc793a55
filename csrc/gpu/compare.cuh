// Comparing masters with weights, for any launch that walks over pieces.
#pragma once

#include "gpu/spans.cuh"

namespace megasetup::gpu {

// Counts in registers while the segment stays the same; adds to the segment's result when it changes.
struct CompareWork {
  Comparison* results;
  int64_t current = -1;
  unsigned long long exact = 0, rounded = 0, first_exact = ~0ull, first_rounded = ~0ull;

  __device__ void flush() {
    if (current >= 0 && exact != 0) {
      auto* result = reinterpret_cast<unsigned long long*>(results + current);
      atomicAdd(result + 0, exact);
      atomicMin(result + 2, first_exact);  // -1 is the largest unsigned number
      if (rounded != 0) {
        atomicAdd(result + 1, rounded);
        atomicMin(result + 3, first_rounded);
      }
    }
    exact = rounded = 0;
    first_exact = first_rounded = ~0ull;
  }

  template <Kind kKind>
  __device__ void element(uint32_t low, uint32_t high, int64_t index) {
    bool exact_differs, rounded_differs;
    if constexpr (kKind == Kind::kCopy2Bytes) {
      exact_differs = rounded_differs = low != high;
    } else {
      const uint32_t wide = kKind == Kind::kCopy4Bytes ? low : widen_bits<kKind>(static_cast<uint16_t>(low));
      if (wide == high) return;
      exact_differs = !(is_nan_bits(wide) && is_nan_bits(high));
      rounded_differs = exact_differs;
      if constexpr (kKind != Kind::kCopy4Bytes) rounded_differs = exact_differs && narrow_bits<kKind>(high) != low;
    }
    if (exact_differs && exact++ == 0) first_exact = index;
    if (rounded_differs && rounded++ == 0) first_rounded = index;
  }

  template <Kind kKind, typename LowVector, typename HighVector, typename Low, typename High>
  __device__ void piece(const Low* low, const High* high, int64_t offset, int count) {
    int done = 0;
    if (aligned<LowVector>(low) && aligned<HighVector>(high)) {
      const auto* low_vectors = reinterpret_cast<const LowVector*>(low);
      const auto* high_vectors = reinterpret_cast<const HighVector*>(high);
      const int vectors = count / kVector;
#pragma unroll 4
      for (int i = threadIdx.x; i < vectors; i += kThreads) {
        const LowVector a = __ldcs(low_vectors + i);
        const HighVector b = __ldcs(high_vectors + i);
        const int64_t index = offset + static_cast<int64_t>(i) * kVector;
        element<kKind>(a.x, b.x, index);
        element<kKind>(a.y, b.y, index + 1);
        element<kKind>(a.z, b.z, index + 2);
        element<kKind>(a.w, b.w, index + 3);
      }
      done = vectors * kVector;
    }
    for (int i = done + threadIdx.x; i < count; i += kThreads) element<kKind>(low[i], high[i], offset + i);
  }

  __device__ void operator()(const Segment& segment, int64_t index, int64_t offset, int count) {
    if (index != current) {
      flush();
      current = index;
    }
    const auto* low = static_cast<const uint16_t*>(segment.weight) + offset;
    const auto* high = static_cast<const uint32_t*>(segment.copy) + offset;
    switch (segment.kind) {
      case Kind::kWidenBf16:
        return piece<Kind::kWidenBf16, ushort4, uint4>(low, high, offset, count);
      case Kind::kWidenFp16:
        return piece<Kind::kWidenFp16, ushort4, uint4>(low, high, offset, count);
      case Kind::kCopy4Bytes:
        return piece<Kind::kCopy4Bytes, uint4, uint4>(static_cast<const uint32_t*>(segment.weight) + offset, high,
                                                      offset, count);
      case Kind::kCopy2Bytes:
        return piece<Kind::kCopy2Bytes, ushort4, ushort4>(low, static_cast<const uint16_t*>(segment.copy) + offset,
                                                          offset, count);
    }
  }
};

}  // namespace megasetup::gpu
