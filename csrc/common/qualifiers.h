// Functions that host and device code share carry this mark.
#pragma once

#ifdef __CUDACC__
#define MEGASETUP_BOTH __host__ __device__ __forceinline__
#else
#define MEGASETUP_BOTH inline
#endif
