// reduce_slices_: the slices in rank order, and the sums of squares of the result in the same pass.
#include "launch.h"
#include "sums.cuh"

namespace zero_shard {
namespace {

// Per multiprocessor: 4 leave a thread 64 registers, 3 leave it 80, 2 leave it 128.
template <class T, bool kHasSums>
constexpr int kMinBlocks = (kHasSums ? 3 : 4) - (sizeof(T) == sizeof(double) ? 1 : 0);

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
    const Slice* slice_start = slice_of<Slice>(args, rank);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = unit + offset_in_unit<kNumel>(v * kNumel);
      if (kNumel > 1 || (i >= begin && i < end)) {
        const Vector<Slice, kNumel> slice = load_vector<kNumel>(slice_start + i);
#pragma unroll
        for (int k = 0; k < kNumel; ++k) {
          const T value = widen(slice.values[k]);
          sums[v].values[k] = rank == 0 ? value : sums[v].values[k] + value;
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
__global__ void __launch_bounds__(kThreads, (kMinBlocks<T, kHasSums>))
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
  const bool is_slice_aligned = args.world_size == 1 || args.numel * sizeof(Slice) % kAccessNbytes == 0;
  const bool are_inputs_aligned = is_aligned(args.slices) && is_aligned(args.own) && is_slice_aligned;
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
      break;
  }
  return "no kernel for this dtype of slices";
}

}  // namespace zero_shard
