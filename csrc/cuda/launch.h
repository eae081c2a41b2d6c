// The CUDA kernels' entry points, callable from files that know no CUDA.
#pragma once

#include "../kernels.h"

namespace zero_shard {

// Each enqueues on the given cudaStream_t of the current device and returns null, or the text of CUDA's error.
const char* launch_adamw(const AdamwArgs& args, void* stream);
const char* launch_reduce_slices(const ReduceArgs& args, void* stream);
const char* launch_flatten(const FlattenArgs& args, void* stream);

}  // namespace zero_shard
