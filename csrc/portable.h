// Macros that let one header serve the host compilers and nvcc.
#pragma once

// Forced inlining is needed for correctness, not only for speed: the CPU loops are compiled once per instruction
// set, and a shared out-of-line copy of a helper could be the AVX-512 one on a machine that has no AVX-512.
#if defined(__CUDACC__)
#define ZERO_SHARD_INLINE static __host__ __device__ __forceinline__
#else
#define ZERO_SHARD_INLINE static inline __attribute__((always_inline))
#endif
