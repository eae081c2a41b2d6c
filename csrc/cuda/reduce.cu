// reduce_slices_: the slices in rank order, and the sums of squares of the result in the same pass.
#include "../wire_codec.h"
#include "launch.h"
#include "sums.cuh"

#include <type_traits>

namespace zero_shard {
namespace {

// Per multiprocessor: 4 leave a thread 64 registers, 3 leave it 80, 2 leave it 128.
template <class T, class Slice, bool kHasSums>
constexpr int kMinBlocks =
    (kHasSums ? 3 : 4) - (sizeof(T) == sizeof(double) || std::is_same_v<Slice, Quantized> ? 1 : 0);

// The slice of a rank, and kNumel elements of it from element i on; vectors lie in one block of the wire.
template <class Slice>
struct SliceOf {
  const Slice* start;
  __device__ __forceinline__ SliceOf(const ReduceArgs& args, int64_t rank)
      : start(slice_of<Slice>(args, rank, args.numel)) {}

  template <int kNumel, class T>
  __device__ __forceinline__ Vector<T, kNumel> load(int64_t i) const {
    const Vector<Slice, kNumel> vector = load_vector<kNumel>(start + i);
    Vector<T, kNumel> wide;
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      wide.values[k] = widen(vector.values[k]);
    }
    return wide;
  }
};
template <>
struct SliceOf<Quantized> {
  const uint8_t* start;
  __device__ __forceinline__ SliceOf(const ReduceArgs& args, int64_t rank)
      : start(slice_of<uint8_t>(args, rank, args.numel / kBlockNumel * kWireBlockNbytes)) {}

  template <int kNumel, class T>
  __device__ __forceinline__ Vector<T, kNumel> load(int64_t i) const {
    const uint8_t* block = start + i / kBlockNumel * kWireBlockNbytes;
    float scale;
    if constexpr (kNumel > 1) {
      scale = *reinterpret_cast<const float*>(block);
    } else {
      memcpy(&scale, block, sizeof scale);  // it may lie anywhere
    }
    const int8_t* codes = reinterpret_cast<const int8_t*>(block + kScaleNbytes) + i % kBlockNumel;
    const Vector<int8_t, kNumel> vector = load_vector<kNumel>(codes);
    Vector<T, kNumel> wide;
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      wide.values[k] = dequantize(vector.values[k], scale);
    }
    return wide;
  }
};

// The lane's values of the unit that begins at element `unit`, written to out. Elements outside begin <= i < end count
// as zero and are not touched; whole units are read in vectors.
template <int kNumel, class T, class Slice>
__device__ __forceinline__ void reduce_unit(
    const ReduceArgs& args, T divisor, int64_t unit, int64_t begin, int64_t end, T (&values)[kPerLane]) {
  constexpr int kVectors = kPerLane / kNumel;
  T* out = static_cast<T*>(args.out);
  Vector<T, kNumel> sums[kVectors]{};
#pragma unroll 1
  for (int64_t rank = 0; rank < args.world_size; ++rank) {
    const SliceOf<Slice> from(args, rank);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = unit + offset_in_unit<kNumel>(v * kNumel);
      if (kNumel > 1 || (i >= begin && i < end)) {
        const Vector<T, kNumel> slice = from.template load<kNumel, T>(i);
#pragma unroll
        for (int k = 0; k < kNumel; ++k) {
          sums[v].values[k] = rank == 0 ? slice.values[k] : sums[v].values[k] + slice.values[k];
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = unit + offset_in_unit<kNumel>(v * kNumel);
    if (kNumel > 1 || (i >= begin && i < end)) {
      Vector<T, kNumel> old{};
      if (args.is_accumulate) {
        old = load_vector<kNumel>(out + i);
      }
#pragma unroll
      for (int k = 0; k < kNumel; ++k) {
        const T mean = sums[v].values[k] / divisor;
        sums[v].values[k] = args.is_accumulate ? old.values[k] + mean : mean;
      }
      store_vector(out + i, sums[v]);
    }
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      values[v * kNumel + k] = sums[v].values[k];
    }
  }
}

// Elements begin <= i < end by one warp, in units that begin at `unit` and every kUnitNumel elements from there.
template <bool kHasSum, class T, class Slice>
__device__ __forceinline__ PairSum
reduce_range(const ReduceArgs& args, T divisor, int64_t unit, int64_t begin, int64_t end, bool has_vectors) {
  constexpr int kNumel = kAccessNbytes / static_cast<int>(sizeof(T));
  PairSum sum{0.0, 0.0};
  for (; unit < end; unit += kUnitNumel) {
    T values[kPerLane];
    if (has_vectors && unit % kNumel == 0 && unit >= begin && unit + kUnitNumel <= end) {
      reduce_unit<kNumel, T, Slice>(args, divisor, unit, begin, end, values);
      if constexpr (kHasSum) {
        add_unit<kNumel>(sum, values);
      }
    } else {
      reduce_unit<1, T, Slice>(args, divisor, unit, begin, end, values);
      if constexpr (kHasSum) {
        add_unit<1>(sum, values);
      }
    }
  }
  return sum;
}

template <class T, class Slice, bool kHasSums>
__global__ void __launch_bounds__(kThreads, (kMinBlocks<T, Slice, kHasSums>))
    reduce_kernel(const __grid_constant__ ReduceArgs args, const int64_t tile_numel, const bool has_vectors) {
  constexpr int64_t kMultiple = kAccessNbytes / static_cast<int64_t>(sizeof(T));
  const T divisor = static_cast<T>(args.divisor);
  for (int64_t tile = warp_number(); tile * tile_numel < args.numel; tile += num_warps()) {
    const auto on_gap = [&](int64_t begin, int64_t end) {
      reduce_range<false, T, Slice>(args, divisor, begin - begin % kMultiple, begin, end, has_vectors);
    };
    if constexpr (kHasSums) {
      for_tile(
          args.sum, tile, tile_numel, kChunkNumel<T>, on_gap,
          [&](int64_t s, const Segment& segment, int64_t begin, int64_t end) {
            const int64_t unit = begin - (begin - segment.start + segment.param_start) % kChunkNumel<T>;
            const PairSum sum =
                sum_over_warp(reduce_range<true, T, Slice>(args, divisor, unit, begin, end, has_vectors));
            if (lane_number() == 0) {
              write_pair(args.sum.partials, tile + s, sum);
            }
          });
    } else {
      on_gap(tile * tile_numel, smaller((tile + 1) * tile_numel, args.numel));
    }
  }
}

template <class T, class Slice>
const char* launch(const ReduceArgs& args, void* stream) {
  // Codes are read four at a time, and every block of the wire begins at a multiple of as many bytes.
  const bool is_slice_aligned =
      std::is_same_v<Slice, Quantized> || args.world_size == 1 || args.numel * sizeof(Slice) % kAccessNbytes == 0;
  // The own slice of blocks begins wherever the flattened bucket has it.
  const auto is_readable = [](const void* slices) {
    return std::is_same_v<Slice, Quantized> ? reinterpret_cast<uintptr_t>(slices) % kScaleNbytes == 0
                                            : is_aligned(slices);
  };
  const bool are_inputs_aligned = is_readable(args.slices) && is_readable(args.own) && is_slice_aligned;
  const bool has_vectors = is_aligned(args.out) && are_inputs_aligned;
  const bool has_sums = args.sum.sums != nullptr;
  const auto kernel = has_sums ? reduce_kernel<T, Slice, true> : reduce_kernel<T, Slice, false>;
  const int64_t tile_numel = sum_tile_numel(args.numel);
  const char* error = launch_warps(kernel, tiles_of(args.numel, tile_numel), stream, args, tile_numel, has_vectors);
  return error != nullptr || !has_sums ? error : launch_partials(args.sum, args.slice_dtype, stream);
}

}  // namespace

const char* launch_reduce_slices(const ReduceArgs& args, void* stream) {
  switch (args.slice_dtype) {
    case DType::kFloat32:
      return launch<float, float>(args, stream);
    case DType::kFloat64:
      return launch<double, double>(args, stream);
    case DType::kBFloat16:
      return launch<float, BFloat16>(args, stream);
    case DType::kFloat16:
      return launch<float, Float16>(args, stream);
    case DType::kInt8:
      return launch<float, Quantized>(args, stream);
  }
  return "no kernel for this dtype of slices";
}

}  // namespace zero_shard
