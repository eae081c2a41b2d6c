// The CPU loops, one table of them for each instruction set.
#pragma once

#include "../kernels.h"

namespace zero_shard {

// Each function does the elements begin <= i < end of its output; threads take disjoint ranges.
struct CpuLoops {
  const char* instruction_set;
  void (*adamw)(const AdamwArgs& args, int64_t begin, int64_t end);
  void (*reduce_slices)(const ReduceArgs& args, int64_t begin, int64_t end);
  void (*flatten)(const FlattenArgs& args, int64_t begin, int64_t end);
};

// The table in force: the widest that this machine runs, or a narrower one that ZERO_SHARD_CPU_CAPABILITY names.
const CpuLoops& cpu_loops();

// Forces a table by name ("" = choose again); false if this machine or build has no such table.
bool force_cpu_loops(const char* instruction_set);

}  // namespace zero_shard
