// How a launch walks over many tensors. All segments are laid end to end and cut into tiles. A launch that writes has a
// block for every tile: on a Hopper GPU that reaches 97% of a copy's bandwidth, blocks that stay and loop reach 89%. A
// launch that counts keeps its blocks, each taking every gridDim.x-th tile, so that counts stay in registers.
#pragma once

#include <cuda_fp16.h>

#include "common/floats.h"
#include "gpu/convert.h"
#include "gpu/cuda.h"

namespace megasetup::gpu {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kVector =
    4;  // elements a thread moves at once: an 8-byte load and a 16-byte store reach the memory's limit
constexpr int kTileElements = kThreads * kUnroll * kVector;
constexpr int kBlocksPerMultiprocessor = 8;  // of those that stay
constexpr int kBlocksInTheBackground = 2;    // of those that leave room for others
// Segments start at multiples of this, with gaps between them where need be: so that a tile's edge inside a tensor
// falls where vectors may start, whatever the lengths of the tensors before it.
constexpr int64_t kSegmentAlignment = 8;

// The last of segments [low, high) that starts at or before `position`; segments[low] does.
__device__ inline int64_t find_segment(const Segment* segments, int64_t low, int64_t high, int64_t position) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (segments[middle].start <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls work(segment, index of it, first element within it, count) for each piece of each tile of this block. All
// threads of the block make the same calls.
template <typename Work>
__device__ void for_pieces(const Segment* segments, int64_t size, int64_t elements, Work& work) {
  int64_t index = 0;
  for (int64_t tile = blockIdx.x; tile * kTileElements < elements; tile += gridDim.x) {
    int64_t position = tile * kTileElements;
    const int64_t end = position + kTileElements < elements ? position + kTileElements : elements;
    index = find_segment(segments, index, size, position);
    while (true) {
      const Segment segment = segments[index];
      const int64_t offset = position - segment.start;
      const int64_t left = segment.count - offset;
      if (left > 0) {
        const int64_t count = left < end - position ? left : end - position;
        work(segment, index, offset, static_cast<int>(count));
      }
      if (index + 1 == size || segments[index + 1].start >= end) break;
      position = segments[++index].start;
    }
  }
}

inline int64_t tiles_of(int64_t elements) { return (elements + kTileElements - 1) / kTileElements; }

// Blocks for a launch that writes, one a tile.
inline unsigned grid_of_tiles(int64_t elements) { return static_cast<unsigned>(tiles_of(elements)); }

// Blocks for a launch that counts: as many as the current device runs at once, or fewer for each multiprocessor.
inline unsigned grid_that_stays(int64_t elements, int blocks_per_multiprocessor = kBlocksPerMultiprocessor) {
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "reading the current device");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
  const int64_t most = static_cast<int64_t>(multiprocessors) * blocks_per_multiprocessor;
  return static_cast<unsigned>(tiles_of(elements) < most ? tiles_of(elements) : most);
}

template <typename T>
__device__ bool aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(T) == 0;
}

template <Kind kKind>
__device__ uint32_t widen_bits(uint16_t value) {
  return kKind == Kind::kWidenBf16 ? bf16_to_fp32_bits(value) : fp16_to_fp32_bits(value);
}

// For numbers the hardware's conversion; for NaNs the integer one, whose payload is the CPU's.
template <>
__device__ inline uint32_t widen_bits<Kind::kWidenFp16>(uint16_t value) {
  if ((value & 0x7fffu) > 0x7c00u) return fp16_to_fp32_bits(value);
  return __float_as_uint(__half2float(__ushort_as_half(value)));
}

template <Kind kKind>
__device__ uint16_t narrow_bits(uint32_t bits) {
  return kKind == Kind::kWidenBf16 ? fp32_to_bf16_bits(bits) : fp32_to_fp16_bits(bits);
}

template <>
__device__ inline uint16_t narrow_bits<Kind::kWidenFp16>(uint32_t bits) {
  if (is_nan_bits(bits)) return fp32_to_fp16_bits(bits);
  return __half_as_ushort(__float2half_rn(__uint_as_float(bits)));
}

template <Kind kKind>
__device__ uint4 widen_bits(ushort4 v) {
  return make_uint4(widen_bits<kKind>(v.x), widen_bits<kKind>(v.y), widen_bits<kKind>(v.z), widen_bits<kKind>(v.w));
}

template <Kind kKind>
__device__ ushort4 narrow_bits(uint4 v) {
  return make_ushort4(narrow_bits<kKind>(v.x), narrow_bits<kKind>(v.y), narrow_bits<kKind>(v.z),
                      narrow_bits<kKind>(v.w));
}

}  // namespace megasetup::gpu
