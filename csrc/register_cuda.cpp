// The operators on CUDA devices: checks, device guard, current stream, scratch memory.
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

// Memory for the partial sums, if sums are wanted. Released at the end of the call, when only work that the stream
// already holds uses it: the allocator gives it away in stream order.
std::optional<Tensor> allocate_partials(const Tensor& device_of, SumArgs& sum) {
  if (sum.sums == nullptr) {
    return std::nullopt;
  }
  const int64_t numel = sum_partials_numel(sum.numel, sum.num_segments);
  Tensor partials = torch::stable::new_empty(device_of, {numel}, torch::headeronly::ScalarType::Double);
  sum.partials = static_cast<double*>(partials.data_ptr());
  return partials;
}

void adamw(const AdamwTensors& tensors) {
  std::vector<Run> runs;
  const AdamwArgs args = check_adamw(tensors, runs);
  on_stream_of(tensors.param, "adamw_", [&](void* stream) { return launch_adamw(args, stream); });
}

void quantize(Tensor wire, Tensor values) {
  const QuantizeArgs args = check_quantize(wire, values);
  on_stream_of(wire, "quantize_", [&](void* stream) { return launch_quantize(args, stream); });
}

void reduce_slices(
    Tensor out, Tensor slices, int64_t divisor, bool accumulate, std::optional<Tensor> segments,
    std::optional<Tensor> sums, std::optional<Tensor> own, int64_t own_rank) {
  ReduceArgs args = check_reduce_slices(out, slices, divisor, accumulate, segments, sums, own, own_rank);
  on_stream_of(out, "reduce_slices_", [&](void* stream) {
    const std::optional<Tensor> partials = allocate_partials(out, args.sum);
    return launch_reduce_slices(args, stream);
  });
}

void sum_squares(
    Tensor sums, std::vector<Tensor> tensors, std::vector<int64_t> offsets, int64_t numel, Tensor segments) {
  std::vector<Run> runs;
  SumSquaresArgs args = check_sum_squares(sums, tensors, offsets, numel, segments, runs);
  on_stream_of(sums, "sum_squares_", [&](void* stream) {
    const std::optional<Tensor> partials = allocate_partials(sums, args.sum);
    return launch_sum_squares(args, stream);
  });
}

void sum_pairs(Tensor total, Tensor pairs) {
  check_sum_pairs(total, pairs);
  on_stream_of(total, "sum_pairs_", [&](void* stream) {
    return launch_sum_pairs(
        static_cast<double*>(total.data_ptr()), static_cast<const double*>(pairs.data_ptr()), pairs.size(0), stream);
  });
}

void flatten(Tensor flat, std::vector<Tensor> tensors, std::vector<int64_t> offsets, std::optional<Tensor> scale) {
  std::vector<FlattenEntry> entries;
  const FlattenArgs args = check_flatten(flat, tensors, offsets, scale, entries);
  on_stream_of(flat, "flatten_", [&](void* stream) { return launch_flatten(args, stream); });
}

void unflatten(std::vector<Tensor> tensors, Tensor flat, std::vector<int64_t> offsets, std::optional<Tensor> scale) {
  std::vector<FlattenEntry> entries;
  const FlattenArgs args = check_unflatten(tensors, flat, offsets, scale, entries);
  on_stream_of(flat, "unflatten_", [&](void* stream) { return launch_unflatten(args, stream); });
}

}  // namespace
}  // namespace zero_shard

STABLE_TORCH_LIBRARY_IMPL(zero_shard, CUDA, library) {
  library.impl("flatten_", TORCH_BOX(&zero_shard::flatten));
  library.impl("unflatten_", TORCH_BOX(&zero_shard::unflatten));
  library.impl("quantize_", TORCH_BOX(&zero_shard::quantize));
  library.impl("reduce_slices_", TORCH_BOX(&zero_shard::reduce_slices));
  library.impl("sum_squares_", TORCH_BOX(&zero_shard::sum_squares));
  library.impl("sum_pairs_", TORCH_BOX(&zero_shard::sum_pairs));
  library.impl("adamw_", TORCH_BOX(&zero_shard::adamw_entry<zero_shard::adamw>));
}
