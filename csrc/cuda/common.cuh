// What the kernels share: how work is spread over warps, 16-byte accesses, and how large a grid is.
//
// Note [Warp tiles]: every kernel is one flat grid-stride launch in which each warp takes whole tiles. What a tile
// needs from the tables is the same for all lanes of a warp, so a warp never waits for another one, and a shard of
// 20,000 small parameters keeps as many warps busy as one large parameter.
//
// Note [Whole sectors]: a lane's vector fills 16 bytes in the widest tensor that is written. In narrower tensors its
// accesses are shorter, but those of a warp leave no holes. Vectors of 16 bytes in the narrowest tensor would make a
// lane write 32 bytes of the widest in two accesses, each of which writes half of every 32-byte sector that it touches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../kernels.h"
#include "../number_formats.h"

namespace zero_shard {

constexpr int kThreads = 256;
constexpr int kLanesPerWarp = 32;
constexpr int kWarps = kThreads / kLanesPerWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kAccessNbytes = 16;  // widest load and store of one thread
// Enough blocks to hide the latency of memory and the uneven end; grid-stride loops do the rest.
constexpr int64_t kWaves = 4;
// Tables on the host travel as kernel arguments: no copy to the device to wait for, and the launch can be captured in a
// graph. So much fits on every driver.
constexpr size_t kArgumentsNbytes = 4096;

__host__ __device__ constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__host__ __device__ constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

__device__ __forceinline__ int lane_number() { return static_cast<int>(threadIdx.x) % kLanesPerWarp; }
__device__ __forceinline__ int64_t warp_number() {
  return int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kLanesPerWarp;
}
__device__ __forceinline__ int64_t num_warps() { return int64_t{gridDim.x} * kWarps; }

// The widest access of so many bytes.
template <int kNbytes>
struct Access {
  using Type = uint4;
};
template <>
struct Access<8> {
  using Type = uint2;
};
template <>
struct Access<4> {
  using Type = uint32_t;
};
template <>
struct Access<2> {
  using Type = uint16_t;
};
template <>
struct Access<1> {
  using Type = uint8_t;
};

// kNumel neighbouring elements, moved in accesses of at most 16 bytes. By intrinsics, as the compiler may split an
// ordinary access, or not see that it goes to global memory; by those for data that are used once per launch.
template <class T, int kNumel>
struct alignas(kAccessNbytes) Vector {
  static constexpr int kNbytes = static_cast<int>(sizeof(T)) * kNumel;
  using Part = typename Access<(kNbytes < kAccessNbytes ? kNbytes : kAccessNbytes)>::Type;
  static constexpr int kParts = kNbytes / static_cast<int>(sizeof(Part));
  static_assert(kNbytes % sizeof(Part) == 0, "a vector is whole accesses");
  T values[kNumel];
};

template <int kNumel, class T>
__device__ __forceinline__ Vector<T, kNumel> load_vector(const T* pointer) {
  using Part = typename Vector<T, kNumel>::Part;
  Vector<T, kNumel> vector;
#pragma unroll
  for (int i = 0; i < Vector<T, kNumel>::kParts; ++i) {
    reinterpret_cast<Part*>(&vector)[i] = __ldcs(reinterpret_cast<const Part*>(pointer) + i);
  }
  return vector;
}

template <class T, int kNumel>
__device__ __forceinline__ void store_vector(T* pointer, const Vector<T, kNumel>& vector) {
  using Part = typename Vector<T, kNumel>::Part;
#pragma unroll
  for (int i = 0; i < Vector<T, kNumel>::kParts; ++i) {
    __stcs(reinterpret_cast<Part*>(pointer) + i, reinterpret_cast<const Part*>(&vector)[i]);
  }
}

// A whole vector, or its first num elements one by one.
template <bool kIsWhole, int kNumel, class T>
__device__ __forceinline__ Vector<T, kNumel> load_first(const T* pointer, int num) {
  if constexpr (kIsWhole) {
    return load_vector<kNumel>(pointer);
  } else {
    Vector<T, kNumel> vector{};
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      if (k < num) {
        vector.values[k] = pointer[k];
      }
    }
    return vector;
  }
}

template <bool kIsWhole, class T, int kNumel>
__device__ __forceinline__ void store_first(T* pointer, const Vector<T, kNumel>& vector, int num) {
  if constexpr (kIsWhole) {
    store_vector(pointer, vector);
  } else {
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      if (k < num) {
        pointer[k] = vector.values[k];
      }
    }
  }
}

__host__ __device__ inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAccessNbytes == 0;
}

// first_range_after by the lanes of a warp together: with 32 probes at a time few loads wait for one another.
template <class Range>
__device__ __forceinline__ int64_t first_range_after_by_warp(const Range* ranges, int64_t num, int64_t position) {
  int64_t low = 0;
  int64_t high = num;
  while (low < high) {
    const int64_t step = (high - low + kLanesPerWarp - 1) / kLanesPerWarp;
    const int64_t probe = smaller(low + (lane_number() + 1) * step, high) - 1;
    const bool is_after = ranges[probe].start + ranges[probe].numel > position;
    const unsigned votes = __ballot_sync(kAllLanes, is_after);
    if (votes == 0) {
      return high;
    }
    const int64_t num_before = __ffs(static_cast<int>(votes)) - 1;
    high = smaller(low + (num_before + 1) * step, high) - 1;
    low = low + num_before * step;
  }
  return low;
}

// One launch with a warp for each tile, or with fewer warps, which then take several; no tiles, no launch.
template <class... Params, class... Args>
const char* launch_warps(void (*kernel)(Params...), int64_t num_tiles, void* stream, const Args&... args) {
  if (num_tiles == 0) {
    return nullptr;
  }
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
  if (error == cudaSuccess) {
    const int64_t most = int64_t{num_processors} * blocks_per_processor * kWaves;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(smaller((num_tiles + kWarps - 1) / kWarps, most)));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    error = cudaLaunchKernelEx(&config, kernel, args...);
  }
  if (error == cudaSuccess) {
    return nullptr;
  }
  cudaGetLastError();  // the caller is told; the next call must not find it
  return cudaGetErrorString(error);
}

inline int64_t tiles_of(int64_t numel, int64_t tile_numel) { return (numel + tile_numel - 1) / tile_numel; }

}  // namespace zero_shard
