// The operators' schemas.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(zero_shard, library) {
  library.def("flatten_(Tensor(a!) flat, Tensor[] tensors, int[] offsets, Tensor? scale) -> ()");
  library.def("unflatten_(Tensor(a!)[] tensors, Tensor flat, int[] offsets, Tensor? scale) -> ()");
  library.def("quantize_(Tensor(a!) wire, Tensor values) -> ()");
  library.def(
      "reduce_slices_(Tensor(a!) out, Tensor slices, int divisor, bool accumulate, Tensor? segments, "
      "Tensor(b!)? sums, Tensor? own=None, int own_rank=0) -> ()");
  library.def("sum_squares_(Tensor(a!) sums, Tensor[] tensors, int[] offsets, int numel, Tensor segments) -> ()");
  library.def("sum_pairs_(Tensor(a!) total, Tensor pairs) -> ()");
  library.def(
      "adamw_(Tensor(a!) param, Tensor(b!)? low, Tensor[] grads, int[] grad_offsets, Tensor(c!) exp_avg, "
      "Tensor(d!) exp_avg_sq, Tensor(e!)? max_exp_avg_sq, Tensor(f!)? exp_avg_scale, Tensor(g!)? exp_avg_sq_scale, "
      "Tensor segments, Tensor slot_steps, Tensor slot_is_active, Tensor slot_groups, Tensor slot_numbers, "
      "Tensor group_hyper, Tensor? grad_scale, Tensor? found_inf, bool stochastic) -> ()");
  library.def("cpu_instruction_set() -> str");
  library.def("force_cpu_instruction_set(str name) -> ()");
}
