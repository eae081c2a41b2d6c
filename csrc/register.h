// From Torch tensors, checked, to the plain arguments of kernels.h; the same for every device.
//
// Torch's stable ABI (PyTorch 2.10 and later): one build serves all later versions.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "kernels.h"

namespace zero_shard {

using torch::stable::Tensor;

// The arguments of adamw_, in the order of its schema.
struct AdamwTensors {
  Tensor param;
  std::optional<Tensor> low;
  std::vector<Tensor> grads;
  std::vector<int64_t> grad_offsets;
  Tensor exp_avg;
  Tensor exp_avg_sq;
  std::optional<Tensor> max_exp_avg_sq;
  std::optional<Tensor> exp_avg_scale;
  std::optional<Tensor> exp_avg_sq_scale;
  Tensor segments;
  Tensor slot_steps;
  Tensor slot_is_active;
  Tensor slot_groups;
  Tensor slot_numbers;
  Tensor group_hyper;
  std::optional<Tensor> grad_scale;
  std::optional<Tensor> found_inf;
  bool is_stochastic;
};

// What Torch calls for adamw_: one list of arguments for all devices.
template <void (*kRun)(const AdamwTensors&)>
void adamw_entry(
    Tensor param, std::optional<Tensor> low, std::vector<Tensor> grads, std::vector<int64_t> grad_offsets,
    Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> max_exp_avg_sq, std::optional<Tensor> exp_avg_scale,
    std::optional<Tensor> exp_avg_sq_scale, Tensor segments, Tensor slot_steps, Tensor slot_is_active,
    Tensor slot_groups, Tensor slot_numbers, Tensor group_hyper, std::optional<Tensor> grad_scale,
    std::optional<Tensor> found_inf, bool stochastic) {
  const AdamwTensors tensors{std::move(param),          std::move(low),           std::move(grads),
                             std::move(grad_offsets),   std::move(exp_avg),       std::move(exp_avg_sq),
                             std::move(max_exp_avg_sq), std::move(exp_avg_scale), std::move(exp_avg_sq_scale),
                             std::move(segments),       std::move(slot_steps),    std::move(slot_is_active),
                             std::move(slot_groups),    std::move(slot_numbers),  std::move(group_hyper),
                             std::move(grad_scale),     std::move(found_inf),     stochastic};
  kRun(tensors);
}

// Each throws (in Python: RuntimeError) with the argument's name, what was expected and what was given.
// The contents of the tables are not read here: they live on the device. runs and entries back the result and must
// outlive it; empty tensors get none. args.sum.partials is left to the caller.
AdamwArgs check_adamw(const AdamwTensors& tensors, std::vector<Run>& runs);

QuantizeArgs check_quantize(const Tensor& wire, const Tensor& values);

ReduceArgs check_reduce_slices(
    const Tensor& out, const Tensor& slices, int64_t divisor, bool accumulate, const std::optional<Tensor>& segments,
    const std::optional<Tensor>& sums, const std::optional<Tensor>& own, int64_t own_rank);

SumSquaresArgs check_sum_squares(
    const Tensor& sums, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets, int64_t numel,
    const Tensor& segments, std::vector<Run>& runs);

void check_sum_pairs(const Tensor& total, const Tensor& pairs);

FlattenArgs check_flatten(
    const Tensor& flat, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets,
    const std::optional<Tensor>& scale, std::vector<FlattenEntry>& entries);

FlattenArgs check_unflatten(
    const std::vector<Tensor>& tensors, const Tensor& flat, const std::vector<int64_t>& offsets,
    const std::optional<Tensor>& scale, std::vector<FlattenEntry>& entries);

}  // namespace zero_shard
