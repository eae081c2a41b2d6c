// Sums of squares on warps. See Note [Canonical chunks].
//
// A warp takes 256 elements at a time, a unit: one chunk of float values or 16 of double ones. Of a unit a lane holds 8
// values, those of a vector side by side; value j is element offset_in_unit<kNumel>(j). Folding a chunk by halves adds
// what one lane holds first, then what lies in lanes 16, 8, ... apart.
#pragma once

#include "../pair_sum.h"
#include "common.cuh"

namespace zero_shard {

constexpr int kUnitNumel = 256;
constexpr int kPerLane = kUnitNumel / kLanesPerWarp;
static_assert(kUnitNumel == kChunkNumel<float> && kUnitNumel % kChunkNumel<double> == 0, "a unit is whole chunks");

// kNumel: the length of vectors; 1 is the layout of single elements, in which any part of a unit is read without gaps.
template <int kNumel>
__device__ __forceinline__ int offset_in_unit(int j) {
  return (j / kNumel * kLanesPerWarp + lane_number()) * kNumel + j % kNumel;
}

template <int kNumel>
__device__ __forceinline__ void add_unit(PairSum& sum, const double (&values)[kPerLane]) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    add_to(sum, values[j] * values[j]);
  }
}

template <int kNumel>
__device__ __forceinline__ void add_unit(PairSum& sum, const float (&values)[kPerLane]) {
  double squares[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const double value = static_cast<double>(values[j]);
    squares[j] = value * value;
  }
#pragma unroll
  for (int num = kPerLane / 2; num >= kNumel; num /= 2) {
#pragma unroll
    for (int j = 0; j < num; ++j) {
      squares[j] = squares[j] + squares[j + num];
    }
  }
  // Two lanes that hold the same kNumel places of the chunk share them out; once one is left, both get the sum.
  constexpr int kSmallestDistance = static_cast<int>(kLanes) / kNumel;
  int num = kNumel;
#pragma unroll
  for (int distance = kLanesPerWarp / 2; distance >= kSmallestDistance; distance /= 2) {
    if (num == 1) {
      squares[0] = squares[0] + __shfl_xor_sync(kAllLanes, squares[0], distance);
    } else {
      num /= 2;
      const bool is_upper = (lane_number() & distance) != 0;
#pragma unroll
      for (int j = 0; j < num; ++j) {
        const double kept = is_upper ? squares[j + num] : squares[j];
        const double given = is_upper ? squares[j] : squares[j + num];
        squares[j] = kept + __shfl_xor_sync(kAllLanes, given, distance);
      }
    }
  }
  if ((lane_number() & kSmallestDistance) == 0) {
    add_to(sum, squares[0]);
  }
}

// The sum over all lanes, in each of them.
__device__ __forceinline__ PairSum sum_over_warp(PairSum sum) {
#pragma unroll
  for (int distance = kLanesPerWarp / 2; distance > 0; distance /= 2) {
    PairSum other;
    other.high = __shfl_xor_sync(kAllLanes, sum.high, distance);
    other.low = __shfl_xor_sync(kAllLanes, sum.low, distance);
    add_to(sum, other);
  }
  return sum;
}

// The same for all threads of a block, in its first warp. Called by all threads.
__device__ __forceinline__ PairSum sum_over_block(PairSum sum) {
  __shared__ PairSum sums[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kLanesPerWarp;
  sum = sum_over_warp(sum);
  if (lane_number() == 0) {
    sums[warp] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    sum = sum_over_warp(lane_number() < kWarps ? sums[lane_number()] : PairSum{0.0, 0.0});
  }
  __syncthreads();  // the next call may write
  return sum;
}

__device__ __forceinline__ PairSum read_pair(const double* pairs, int64_t i) {
  return PairSum{pairs[2 * i], pairs[2 * i + 1]};
}
__device__ __forceinline__ void write_pair(double* pairs, int64_t i, PairSum sum) {
  pairs[2 * i] = sum.high;
  pairs[2 * i + 1] = sum.low;
}

// Calls on_gap(begin, end) and on_segment(s, segment, begin, end) for the parts of one tile, in ascending order. See
// tile_start: what of a segment is called for begins and ends with a chunk or with the segment.
template <class OnGap, class OnSegment>
__device__ __forceinline__ void for_tile(
    const SumArgs& sum, int64_t tile, int64_t tile_numel, int64_t chunk_numel, const OnGap& on_gap,
    const OnSegment& on_segment) {
  const int64_t begin = tile * tile_numel;
  const int64_t end = smaller(begin + tile_numel, sum.numel);
  int64_t done = begin;
  for (int64_t s = first_range_after_by_warp(sum.segments, sum.num_segments, begin); s < sum.num_segments; ++s) {
    const Segment segment = sum.segments[s];
    if (segment.start >= end) {
      break;
    }
    const int64_t segment_end = segment.start + segment.numel;
    const int64_t first = segment.start < begin ? move_to_chunk(segment, begin, chunk_numel) : segment.start;
    const int64_t last = segment_end > end ? move_to_chunk(segment, end, chunk_numel) : segment_end;
    if (done < segment.start) {
      on_gap(done, segment.start);
    }
    if (first < last) {
      on_segment(s, segment, first, last);
    }
    done = larger(done, last);
  }
  if (done < end) {
    on_gap(done, end);
  }
}

// Elements of one tile. Few enough that the partial sums of one large parameter are added in no time, small enough that
// the tiles of a small shard keep the device busy.
inline int64_t sum_tile_numel(int64_t numel) {
  constexpr int64_t kSmallest = 8 * kUnitNumel;
  constexpr int64_t kMostTiles = 65536;
  return larger(kSmallest, tiles_of(tiles_of(numel, kMostTiles), kUnitNumel) * kUnitNumel);
}

// From the partial sums of all tiles to sum.sums.
const char* launch_partials(const SumArgs& sum, DType dtype, void* stream);

}  // namespace zero_shard
