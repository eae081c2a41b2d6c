// What the register files hand to the loops and kernels: raw pointers and counts, no Torch.
#pragma once

#include <cstdint>

#include "portable.h"

namespace zero_shard {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt8 };

// A part of a parameter that lies in the shard, in elements.
struct Segment {
  int64_t start;
  int64_t numel;
  int64_t slot;
  int64_t param_start;  // counted from the start of the parameter, in memory order
};

// Elements start to start + numel of the shard in one tensor's memory; data points at the first of them.
// Runs ascend, are disjoint and not empty.
struct Run {
  const void* data;
  int64_t start;
  int64_t numel;
};

struct AdamwArgs {
  int64_t numel;
  DType param_dtype;
  DType grad_dtype;
  DType moment_dtype;
  bool is_stochastic;
  void* param;
  void* low;        // null: no master
  const Run* runs;  // the gradient; on the host. Every active segment lies within one run
  int64_t num_runs;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;     // null: no amsgrad
  float* exp_avg_scale;     // one for each block; null: moments are no codes
  float* exp_avg_sq_scale;  // the same
  const Segment* segments;
  int64_t num_segments;
  const float* slot_steps;
  const uint8_t* slot_is_active;
  const int32_t* slot_groups;
  const int64_t* slot_numbers;
  const double* group_hyper;
  const void* grad_scale;  // null: 1
  bool is_grad_scale_double;
  const float* found_inf;  // null: 0; anything else than 0 leaves everything as it is
};

// Sums of squares by segment. See Note [Canonical chunks].
struct SumArgs {
  int64_t numel;
  const Segment* segments;
  int64_t num_segments;
  double* sums;      // [S, 2]; null: none are wanted
  double* partials;  // [tiles + S, 2]
};

// From values to blocks of the wire. See Note [Wire blocks].
struct QuantizeArgs {
  void* wire;
  const void* values;
  int64_t numel;  // a multiple of a block
  DType dtype;    // of the values
};

struct ReduceArgs {
  void* out;
  const void* slices;  // of all ranks, in rank order; without that of own_rank where own is given
  const void* own;     // may be null
  int64_t own_rank;
  int64_t world_size;
  int64_t numel;
  DType slice_dtype;  // kInt8: blocks of the wire
  int64_t divisor;
  bool is_accumulate;
  SumArgs sum;
};

// The slice of a rank, of so many elements of its type.
template <class Slice>
ZERO_SHARD_INLINE const Slice* slice_of(const ReduceArgs& args, int64_t rank, int64_t length) {
  const bool has_own = args.own != nullptr;
  if (has_own && rank == args.own_rank) {
    return static_cast<const Slice*>(args.own);
  }
  return static_cast<const Slice*>(args.slices) + (rank - (has_own && rank > args.own_rank ? 1 : 0)) * length;
}

struct SumSquaresArgs {
  DType dtype;      // of all runs
  const Run* runs;  // on the host; elements of a segment that no run holds count as 0
  int64_t num_runs;
  SumArgs sum;
};

constexpr int64_t kMaxDims = 6;

// One tensor of flatten_ or unflatten_: its elements in row-major order, from whatever strides.
struct FlattenEntry {
  void* data;
  int64_t start;  // in the flat buffer
  int64_t numel;
  int64_t dtype;               // a DType; wide, so that the struct has no padding
  int64_t num_dims;            // 0: contiguous. Neighbouring dimensions that are one run of memory are joined
  int64_t lengths[kMaxDims];
  int64_t strides[kMaxDims];
};

// Entries ascend, are disjoint and not empty.
struct FlattenArgs {
  void* flat;
  DType flat_dtype;
  int64_t numel;
  const FlattenEntry* entries;
  int64_t num_entries;
  const float* scale;  // null: 1
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
