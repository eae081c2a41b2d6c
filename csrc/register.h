// From Torch tensors, checked, to the plain arguments of kernels.h; the same for every device.
//
// Torch's stable ABI (PyTorch 2.10 and later): one build serves all later versions.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace zero_shard {

using torch::stable::Tensor;

// Each throws (in Python: RuntimeError) with the argument's name, what was expected and what was given.
// The contents of the tables are not read here: they live on the device.
AdamwArgs check_adamw(
    const Tensor& param, const std::optional<Tensor>& low, const Tensor& grad, const Tensor& exp_avg,
    const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq, const Tensor& segments,
    const Tensor& slot_steps, const Tensor& slot_is_active, const Tensor& slot_groups, const Tensor& group_hyper,
    const std::optional<Tensor>& grad_scale);

ReduceArgs check_reduce_slices(const Tensor& out, const Tensor& slices, int64_t divisor, bool accumulate);

// entries backs the result and must outlive it. Empty tensors get no entry.
FlattenArgs check_flatten(
    const Tensor& out, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets,
    std::vector<FlattenEntry>& entries);

}  // namespace zero_shard
