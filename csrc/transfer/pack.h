// The GPU's part of one chunk: read each weight once, write its FP32 device copy, and lay out what will cross the wire.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/convert.h"

namespace megasetup::transfer {

// Pieces of one chunk in device memory. `start` is the piece's place in the slot, `copy` its device copy or null.
struct PackedChunk {
  const gpu::Segment* pieces;
  int64_t size;
  int64_t elements;  // of the slot, gaps included
  Kind kind;
};

// The weights' own bits go into the slot, to be widened by the CPU; with `write_copies` the device copies are written
// too (a comparison writes nothing).
void pack_staged(const PackedChunk& chunk, void* slot, bool write_copies, cudaStream_t stream);
// Widened weights go into the device copy, or into the slot where there is none, to be sent as they are.
void pack_direct(const PackedChunk& chunk, void* slot, cudaStream_t stream);
// Compares the chunk's weights with masters that were brought into the slot. One result a piece, which the caller has
// cleared.
void compare_slot(const PackedChunk& chunk, const void* slot, Comparison* results, cudaStream_t stream);
// Loads the kernels now, so that the first chunk does not wait for it.
void preload_pack_kernels();

}  // namespace megasetup::transfer
