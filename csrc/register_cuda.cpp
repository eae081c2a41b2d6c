// The operators on CUDA devices: checks, device guard, current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/launch.h"
#include "register.h"

namespace zero_shard {
namespace {

// Runs a launch on the tensor's device and on the stream that is current there.
template <class Launch>
void on_stream_of(const Tensor& tensor, const char* op, const Launch& launch) {
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  const char* error = launch(stream);
  STD_TORCH_CHECK(error == nullptr, op, ": the launch failed: ", error);
}

void adamw(
    Tensor param, std::optional<Tensor> low, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq,
    std::optional<Tensor> max_exp_avg_sq, Tensor segments, Tensor slot_steps, Tensor slot_is_active, Tensor slot_groups,
    Tensor group_hyper, std::optional<Tensor> grad_scale) {
  const AdamwArgs args = check_adamw(
      param, low, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, segments, slot_steps, slot_is_active, slot_groups,
      group_hyper, grad_scale);
  on_stream_of(param, "adamw_", [&](void* stream) { return launch_adamw(args, stream); });
}

void reduce_slices(Tensor out, Tensor slices, int64_t divisor, bool accumulate) {
  const ReduceArgs args = check_reduce_slices(out, slices, divisor, accumulate);
  on_stream_of(out, "reduce_slices_", [&](void* stream) { return launch_reduce_slices(args, stream); });
}

void flatten(Tensor out, std::vector<Tensor> tensors, std::vector<int64_t> offsets) {
  std::vector<FlattenEntry> entries;
  const FlattenArgs args = check_flatten(out, tensors, offsets, entries);
  on_stream_of(out, "flatten_", [&](void* stream) { return launch_flatten(args, stream); });
}

}  // namespace
}  // namespace zero_shard

STABLE_TORCH_LIBRARY_IMPL(zero_shard, CUDA, library) {
  library.impl("flatten_", TORCH_BOX(&zero_shard::flatten));
  library.impl("reduce_slices_", TORCH_BOX(&zero_shard::reduce_slices));
  library.impl("adamw_", TORCH_BOX(&zero_shard::adamw));
}
