// Digests of 16-bit patterns in GPU memory (see common/digest.h): any number of runs of memory in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/digest.h"
#include "gpu/convert.h"

namespace megasetup::gpu {

// Launches on the current device. Of each segment, in device memory, `weight` and `count` matter, in 16-bit patterns;
// its start is a multiple of kDigestTile, so that every tile begins with a segment or continues one. `patterns` is
// where the last segment ends; `keys` are digest_keys(), in device memory. Tile i's digest goes to digests[i].
void digest(const Segment* segments, int64_t size, int64_t patterns, const uint32_t* keys, uint64_t* digests,
            cudaStream_t stream);
// Loads the kernel now, so that the first launch does not wait for it.
void preload_digest_kernel();

}  // namespace megasetup::gpu
