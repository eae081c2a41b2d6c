// What the kernels share: 16-byte accesses, and how large a grid is.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../number_formats.h"

namespace zero_shard {

constexpr int kThreads = 256;
constexpr int kMinBlocks = 2;          // per multiprocessor: leaves a thread 128 registers
constexpr int64_t kAccessNbytes = 16;  // widest load and store of one thread
// Enough blocks to hide the latency of memory and the uneven end; grid-stride loops do the rest.
constexpr int64_t kWaves = 4;

// kNumel neighbouring elements, moved in 16-byte accesses.
template <class T, int kNumel>
struct alignas(kAccessNbytes) Vector {
  static_assert(sizeof(T) * kNumel % kAccessNbytes == 0, "a vector is whole accesses");
  T values[kNumel];
};

template <int kNumel, class T>
__device__ __forceinline__ Vector<T, kNumel> load_vector(const T* pointer) {
  Vector<T, kNumel> vector;
  const uint4* from = reinterpret_cast<const uint4*>(pointer);
  uint4* to = reinterpret_cast<uint4*>(&vector);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vector) / kAccessNbytes); ++i) {
    to[i] = from[i];
  }
  return vector;
}

template <class T, int kNumel>
__device__ __forceinline__ void store_vector(T* pointer, const Vector<T, kNumel>& vector) {
  const uint4* from = reinterpret_cast<const uint4*>(&vector);
  uint4* to = reinterpret_cast<uint4*>(pointer);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vector) / kAccessNbytes); ++i) {
    to[i] = from[i];
  }
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAccessNbytes == 0; }

// Blocks for num_tiles tiles of work; 0 and an error if the device cannot be asked.
template <class Kernel>
cudaError_t grid_for(Kernel kernel, int64_t num_tiles, int64_t& num_blocks) {
  int device = 0;
  int num_processors = 0;
  int blocks_per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_processor, kernel, kThreads, 0);
  }
  const int64_t resident = int64_t{num_processors} * blocks_per_processor;
  num_blocks = num_tiles < resident * kWaves ? num_tiles : resident * kWaves;
  return error;
}

// One launch of kThreads threads per block; no tiles, no launch.
template <class Kernel, class... Args>
const char* launch_tiles(Kernel kernel, int64_t num_tiles, void* stream, Args... args) {
  if (num_tiles == 0) {
    return nullptr;
  }
  int64_t num_blocks = 0;
  cudaError_t error = grid_for(kernel, num_tiles, num_blocks);
  if (error == cudaSuccess) {
    kernel<<<static_cast<unsigned>(num_blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args...);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline int64_t tiles_of(int64_t numel, int64_t tile_numel) { return (numel + tile_numel - 1) / tile_numel; }

}  // namespace zero_shard
