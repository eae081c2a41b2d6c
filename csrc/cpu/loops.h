// The CPU loops, one table of them for each instruction set.
#pragma once

#include "../kernels.h"

namespace zero_shard {

// Threads share the work by tiles of this many elements of the shard or flat buffer, whatever their number: a few
// microseconds of work each, and no block of moments is cut.
constexpr int64_t kTileNumel = 16384;

// Where ranges are given, each call does the elements begin <= i < end and threads take disjoint ranges, which begin at
// multiples of kTileNumel. Where tiles are given, see tile_start in pair_sum.h.
struct CpuLoops {
  const char* instruction_set;
  void (*adamw)(const AdamwArgs& args, int64_t begin, int64_t end);
  void (*quantize)(const QuantizeArgs& args, int64_t begin, int64_t end);
  void (*reduce_slices)(const ReduceArgs& args, int64_t first_tile, int64_t end_tile);
  void (*sum_squares)(const SumSquaresArgs& args, int64_t first_tile, int64_t end_tile);
  // From the partial sums of all tiles to args.sums; dtype: of the values.
  void (*finish_sums)(const SumArgs& args, DType dtype);
  void (*sum_pairs)(double* total, const double* pairs, int64_t num_pairs);
  void (*flatten)(const FlattenArgs& args, int64_t begin, int64_t end);
  void (*unflatten)(const FlattenArgs& args, int64_t begin, int64_t end);
};

// Whether this processor gains by it; see Note [Prefetch].
extern const bool kIsPrefetching;

// The table in force: the widest that this machine runs, or a narrower one that ZERO_SHARD_CPU_CAPABILITY names.
const CpuLoops& cpu_loops();

// Forces a table by name ("" = choose again); false if this machine or build has no such table.
bool force_cpu_loops(const char* instruction_set);

}  // namespace zero_shard
