// Sums of squares that do not depend on who adds them: float64 within fixed chunks, error-free between them.
//
// Note [Canonical chunks]: a parameter's elements, in memory order, are cut into chunks of kChunkNumel. Element i of a
// chunk has lane i % kLanes. Squares (in double, exact for float values) are folded by halves, i with i + 128, then
// + 64, + 32, + 16, which leaves one partial per lane; a part of a chunk counts as the chunk with zeros elsewhere.
// Partials of lanes and chunks are then added as unevaluated pairs by TwoSum, which keeps about 106 bits, so the order
// of those additions leaves no trace in the rounded sum. Shards are cut at multiples of kLanes elements of a parameter:
// for double, whose chunks are that long, no chunk is ever cut; for float at most one per shard and parameter is.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero_shard {

constexpr int64_t kLanes = 16;

template <class T>
constexpr int64_t kChunkNumel = 256;
template <>
constexpr int64_t kChunkNumel<double> = kLanes;

// high + low, unevaluated.
struct PairSum {
  double high;
  double low;
};

// Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
ZERO_SHARD_INLINE void add_to(PairSum& sum, double value) {
  const double total = sum.high + value;
  const double shadow = total - sum.high;
  sum.low += (sum.high - (total - shadow)) + (value - shadow);
  sum.high = total;
}

ZERO_SHARD_INLINE void add_to(PairSum& sum, PairSum other) {
  add_to(sum, other.high);
  sum.low += other.low;
}

// The nearest double in high, what is missing in low; low is 0 where the sum is not finite (inf - inf is no error
// term).
ZERO_SHARD_INLINE PairSum normalized(PairSum sum) {
  const bool is_finite = sum.high - sum.high == 0.0;
  const double total = sum.high + (is_finite ? sum.low : 0.0);
  return PairSum{total, is_finite ? sum.low - (total - sum.high) : 0.0};
}

// The position moved up to where the next of the segment's chunks begins, or the segment ends.
ZERO_SHARD_INLINE int64_t move_to_chunk(const Segment& segment, int64_t position, int64_t chunk_numel) {
  const int64_t index = position - segment.start + segment.param_start;
  const int64_t moved = position + (chunk_numel - index % chunk_numel) % chunk_numel;
  const int64_t end = segment.start + segment.numel;
  return moved < end ? moved : end;
}

// Work is cut into tiles of tile_numel elements of the shard, moved so that no chunk is cut: where tile number `tile`
// begins. Tile t then does [tile_start(t), tile_start(t + 1)).
ZERO_SHARD_INLINE int64_t tile_start(const SumArgs& args, int64_t tile, int64_t tile_numel, int64_t chunk_numel) {
  const int64_t position = tile * tile_numel;
  if (position >= args.numel) {
    return args.numel;
  }
  const int64_t s = first_range_after(args.segments, args.num_segments, position);
  const bool is_between = s == args.num_segments || args.segments[s].start >= position;
  return is_between ? position : move_to_chunk(args.segments[s], position, chunk_numel);
}

// The partial sum of tile t and segment s lies at partials[t + s]: both ascend, so no two meet. Those of segment s come
// from the tiles first_tile to last_tile.
ZERO_SHARD_INLINE int64_t first_tile(const Segment& segment, int64_t tile_numel) { return segment.start / tile_numel; }
ZERO_SHARD_INLINE int64_t last_tile(const Segment& segment, int64_t tile_numel, int64_t chunk_numel) {
  const int64_t last_index = segment.param_start + segment.numel - 1;
  const int64_t chunk_index = last_index - last_index % chunk_numel;
  const int64_t chunk_start = chunk_index > segment.param_start ? chunk_index : segment.param_start;
  return (chunk_start - segment.param_start + segment.start) / tile_numel;
}

}  // namespace zero_shard
