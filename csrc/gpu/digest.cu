#include "gpu/cuda.h"
#include "gpu/digest.h"
#include "gpu/spans.cuh"

namespace megasetup::gpu {
namespace {

static_assert(kTileElements == kDigestTile, "a block's tile is a digest's");

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
// Enough that reading the keys does not count, few enough that blocks end often and others get their turn.
constexpr int64_t kTilesPerBlock = 16;

// A thread's patterns of a full tile stand at the same places of every tile, so it keeps their keys in registers.
struct DigestWork {
  const uint32_t* all_keys;
  unsigned long long* digests;
  uint4 keys[kUnroll];
  int turn = 0;

  __device__ DigestWork(const uint32_t* all_keys, uint64_t* digests)
      : all_keys(all_keys), digests(reinterpret_cast<unsigned long long*>(digests)) {
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      keys[k] = reinterpret_cast<const uint4*>(all_keys)[threadIdx.x + k * kThreads];
    }
  }

  static __device__ unsigned long long product(uint4 key, ushort4 pattern) {
    return static_cast<unsigned long long>(key.x) * pattern.x + static_cast<unsigned long long>(key.y) * pattern.y +
           static_cast<unsigned long long>(key.z) * pattern.z + static_cast<unsigned long long>(key.w) * pattern.w;
  }

  __device__ unsigned long long sum_of(const uint16_t* patterns, int count) const {
    unsigned long long sum = 0;
    if (aligned<ushort4>(patterns) && count == kTileElements) {
      ushort4 values[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        values[k] = __ldcs(reinterpret_cast<const ushort4*>(patterns) + threadIdx.x + k * kThreads);
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) sum += product(keys[k], values[k]);
    } else {
#pragma unroll 4
      for (int i = threadIdx.x; i < count; i += kThreads) {
        sum += static_cast<unsigned long long>(all_keys[i]) * patterns[i];
      }
    }
    return sum;
  }

  __device__ void operator()(const Segment& segment, int64_t, int64_t offset, int count) {
    // Two sets of sums in turn: while the first thread still adds up one, the next tile fills the other.
    __shared__ unsigned long long sums[2][kWarps];
    unsigned long long sum = sum_of(static_cast<const uint16_t*>(segment.weight) + offset, count);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x % kWarp == 0) sums[turn][threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long total = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += sums[turn][warp];
      digests[(segment.start + offset) / kDigestTile] = total;
    }
    turn ^= 1;
  }
};

__global__ void __launch_bounds__(kThreads)
    digest_kernel(const Segment* segments, int64_t size, int64_t patterns, const uint32_t* keys, uint64_t* digests) {
  DigestWork work(keys, digests);
  for_pieces(segments, size, patterns, work);
}

}  // namespace

void digest(const Segment* segments, int64_t size, int64_t patterns, const uint32_t* keys, uint64_t* digests,
            cudaStream_t stream) {
  if (patterns == 0) return;
  const auto blocks = static_cast<unsigned>((tiles_of(patterns) + kTilesPerBlock - 1) / kTilesPerBlock);
  digest_kernel<<<blocks, kThreads, 0, stream>>>(segments, size, patterns, keys, digests);
  check(cudaGetLastError(), "launching the digests");
}

void preload_digest_kernel() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, digest_kernel), "loading a kernel");
}

}  // namespace megasetup::gpu
