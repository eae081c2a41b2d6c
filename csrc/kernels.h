// What the register files hand to the loops and kernels: raw pointers and counts, no Torch.
#pragma once

#include <cstdint>

#include "portable.h"

namespace zero_shard {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

struct Segment {
  int64_t start;
  int64_t numel;
  int64_t slot;
};

struct AdamwArgs {
  int64_t numel;
  DType param_dtype;
  DType moment_dtype;
  void* param;
  void* low;  // null: no master
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null: no amsgrad
  const Segment* segments;
  int64_t num_segments;
  const float* slot_steps;
  const uint8_t* slot_is_active;
  const int32_t* slot_groups;
  const double* group_hyper;
  const void* grad_scale;  // null: 1
  bool is_grad_scale_double;
};

struct ReduceArgs {
  void* out;
  const void* slices;
  int64_t world_size;
  int64_t numel;
  DType slice_dtype;
  int64_t divisor;
  bool is_accumulate;
};

struct FlattenEntry {
  const void* data;
  int64_t start;
  int64_t numel;
  int64_t dtype;  // a DType; wide, so that the struct has no padding
};

// Entries ascend, are disjoint and not empty.
struct FlattenArgs {
  void* out;
  DType out_dtype;
  int64_t numel;
  const FlattenEntry* entries;
  int64_t num_entries;
};

// The gradient's factor, as stored on the device: reading it costs no synchronisation.
ZERO_SHARD_INLINE double read_grad_scale(const AdamwArgs& args) {
  if (args.grad_scale == nullptr) {
    return 1.0;
  }
  return args.is_grad_scale_double ? *static_cast<const double*>(args.grad_scale)
                                   : static_cast<double>(*static_cast<const float*>(args.grad_scale));
}

// The first of num ascending disjoint ranges (anything with start and numel) that ends after position, else num.
template <class Range>
ZERO_SHARD_INLINE int64_t first_range_after(const Range* ranges, int64_t num, int64_t position) {
  int64_t low = 0;
  int64_t high = num;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (ranges[middle].start + ranges[middle].numel > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace zero_shard
