// The CUDA kernels' entry points, callable from files that know no CUDA.
#pragma once

#include "../kernels.h"

namespace zero_shard {

// Each enqueues on the given cudaStream_t of the current device and returns null, or the text of CUDA's error.
const char* launch_adamw(const AdamwArgs& args, void* stream);
const char* launch_quantize(const QuantizeArgs& args, void* stream);
const char* launch_reduce_slices(const ReduceArgs& args, void* stream);
const char* launch_sum_squares(const SumSquaresArgs& args, void* stream);
const char* launch_sum_pairs(double* total, const double* pairs, int64_t num_pairs, void* stream);
const char* launch_flatten(const FlattenArgs& args, void* stream);
const char* launch_unflatten(const FlattenArgs& args, void* stream);

// How many doubles SumArgs::partials must hold.
int64_t sum_partials_numel(int64_t numel, int64_t num_segments);

}  // namespace zero_shard
