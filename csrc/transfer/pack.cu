#include "gpu/compare.cuh"
#include "gpu/cuda.h"
#include "gpu/spans.cuh"
#include "transfer/pack.h"

namespace megasetup::transfer {
namespace {

using gpu::aligned;
using gpu::kThreads;
using gpu::kVector;
using gpu::Segment;

template <Kind kKind, bool kStaged>
struct PackWork {
  void* slot;
  bool write_copies;

  __device__ void operator()(const Segment& piece, int64_t, int64_t offset, int count) const {
    const int64_t place = piece.start + offset;
    if constexpr (kKind == Kind::kCopy4Bytes) {
      move<uint4>(static_cast<const uint32_t*>(piece.weight) + offset, static_cast<uint32_t*>(slot) + place, count);
    } else if constexpr (kKind == Kind::kCopy2Bytes) {
      move<ushort4>(static_cast<const uint16_t*>(piece.weight) + offset, static_cast<uint16_t*>(slot) + place, count);
    } else {
      widen(static_cast<const uint16_t*>(piece.weight) + offset,
            piece.copy == nullptr || !write_copies ? nullptr : static_cast<uint32_t*>(piece.copy) + offset, place,
            count);
    }
  }

  template <typename Vector, typename T>
  __device__ void move(const T* from, T* to, int count) const {
    int done = 0;
    if (aligned<Vector>(from)) {
      for (int i = threadIdx.x; i < count / kVector; i += kThreads) {
        reinterpret_cast<Vector*>(to)[i] = __ldcs(reinterpret_cast<const Vector*>(from) + i);
      }
      done = count / kVector * kVector;
    }
    for (int i = done + threadIdx.x; i < count; i += kThreads) to[i] = from[i];
  }

  __device__ void widen(const uint16_t* weight, uint32_t* copy, int64_t place, int count) const {
    auto* low = static_cast<uint16_t*>(slot) + place;
    uint32_t* high = copy;
    if (!kStaged && copy == nullptr) high = static_cast<uint32_t*>(slot) + place;
    int done = 0;
    if (aligned<ushort4>(weight) && aligned<uint4>(high)) {
#pragma unroll 4
      for (int i = threadIdx.x; i < count / kVector; i += kThreads) {
        const ushort4 value = __ldcs(reinterpret_cast<const ushort4*>(weight) + i);
        if (kStaged) reinterpret_cast<ushort4*>(low)[i] = value;
        if (high != nullptr) __stcs(reinterpret_cast<uint4*>(high) + i, gpu::widen_bits<kKind>(value));
      }
      done = count / kVector * kVector;
    }
    for (int i = done + threadIdx.x; i < count; i += kThreads) {
      if (kStaged) low[i] = weight[i];
      if (high != nullptr) high[i] = gpu::widen_bits<kKind>(weight[i]);
    }
  }
};

template <Kind kKind, bool kStaged>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const Segment* pieces, int64_t size, int64_t elements, void* slot, bool write_copies) {
  PackWork<kKind, kStaged> work{slot, write_copies};
  gpu::for_pieces(pieces, size, elements, work);
}

// The pieces' masters lie in the slot, each at its piece's place.
struct CompareSlotWork {
  const char* slot;
  gpu::CompareWork compare;

  __device__ void operator()(const Segment& piece, int64_t index, int64_t offset, int count) {
    Segment placed = piece;
    placed.copy = const_cast<char*>(slot) + piece.start * copy_bytes(piece.kind);
    compare(placed, index, offset, count);
  }
};

__global__ void __launch_bounds__(kThreads)
    compare_slot_kernel(const Segment* pieces, int64_t size, int64_t elements, const char* slot, Comparison* results) {
  CompareSlotWork work{slot, {results}};
  gpu::for_pieces(pieces, size, elements, work);
  work.compare.flush();
}

template <Kind kKind, bool kStaged>
void launch(const PackedChunk& chunk, void* slot, bool write_copies, cudaStream_t stream) {
  pack_kernel<kKind, kStaged><<<gpu::grid_of_tiles(chunk.elements), kThreads, 0, stream>>>(
      chunk.pieces, chunk.size, chunk.elements, slot, write_copies);
  gpu::check(cudaGetLastError(), "launching the packing of a chunk");
}

template <Kind kKind, bool kStaged>
void preload() {
  cudaFuncAttributes attributes;
  gpu::check(cudaFuncGetAttributes(&attributes, pack_kernel<kKind, kStaged>), "loading a kernel");
}

}  // namespace

void pack_staged(const PackedChunk& chunk, void* slot, bool write_copies, cudaStream_t stream) {
  switch (chunk.kind) {
    case Kind::kWidenBf16:
      return launch<Kind::kWidenBf16, true>(chunk, slot, write_copies, stream);
    case Kind::kWidenFp16:
      return launch<Kind::kWidenFp16, true>(chunk, slot, write_copies, stream);
    case Kind::kCopy4Bytes:
      return launch<Kind::kCopy4Bytes, true>(chunk, slot, write_copies, stream);
    case Kind::kCopy2Bytes:
      return launch<Kind::kCopy2Bytes, true>(chunk, slot, write_copies, stream);
  }
}

void pack_direct(const PackedChunk& chunk, void* slot, cudaStream_t stream) {
  switch (chunk.kind) {
    case Kind::kWidenBf16:
      return launch<Kind::kWidenBf16, false>(chunk, slot, true, stream);
    case Kind::kWidenFp16:
      return launch<Kind::kWidenFp16, false>(chunk, slot, true, stream);
    case Kind::kCopy4Bytes:
    case Kind::kCopy2Bytes:
      return;  // sent from the weights themselves
  }
}

void compare_slot(const PackedChunk& chunk, const void* slot, Comparison* results, cudaStream_t stream) {
  compare_slot_kernel<<<gpu::grid_that_stays(chunk.elements), kThreads, 0, stream>>>(
      chunk.pieces, chunk.size, chunk.elements, static_cast<const char*>(slot), results);
  gpu::check(cudaGetLastError(), "launching the comparison of a chunk");
}

void preload_pack_kernels() {
  preload<Kind::kWidenBf16, true>();
  preload<Kind::kWidenFp16, true>();
  preload<Kind::kCopy4Bytes, true>();
  preload<Kind::kCopy2Bytes, true>();
  preload<Kind::kWidenBf16, false>();
  preload<Kind::kWidenFp16, false>();
}

}  // namespace megasetup::transfer
