// The operators on the CPU: checks, table contents, threads.
#include <string>

#include "adamw_math.h"
#include "cpu/loops.h"
#include "register.h"

namespace zero_shard {
namespace {

// Elements per thread below which a second thread costs more than it saves (tens of microseconds of work).
constexpr int64_t kGrainNumel = 16384;

// On the CPU the tables can be read, so a wrong one raises instead of writing out of bounds.
void check_tables(const AdamwArgs& args, int64_t num_slots, int64_t num_groups, bool has_max) {
  int64_t end = 0;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const Segment& segment = args.segments[s];
    const bool is_right = segment.numel >= 0 && end <= segment.start && segment.start <= args.numel - segment.numel &&
                          0 <= segment.slot && segment.slot < num_slots;
    STD_TORCH_CHECK(
        is_right, "adamw_: segments[", s, "] must be ascending, disjoint, within ", args.numel, " elements and ",
        num_slots, " slots, got start ", segment.start, ", numel ", segment.numel, ", slot ", segment.slot);
    end = segment.start + segment.numel;
  }
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int32_t group = args.slot_groups[slot];
    STD_TORCH_CHECK(
        0 <= group && group < num_groups, "adamw_: slot_groups[", slot, "] must be a row of the ", num_groups,
        " in group_hyper, got ", group);
    const bool is_amsgrad = args.group_hyper[group * kNumHyper + kIsAmsgrad] != 0.0;
    STD_TORCH_CHECK(
        !is_amsgrad || has_max || !args.slot_is_active[slot], "adamw_: max_exp_avg_sq must be given for group ", group,
        ", which asks for amsgrad, got None");
  }
}

void adamw(
    Tensor param, std::optional<Tensor> low, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq,
    std::optional<Tensor> max_exp_avg_sq, Tensor segments, Tensor slot_steps, Tensor slot_is_active, Tensor slot_groups,
    Tensor group_hyper, std::optional<Tensor> grad_scale) {
  const AdamwArgs args = check_adamw(
      param, low, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, segments, slot_steps, slot_is_active, slot_groups,
      group_hyper, grad_scale);
  check_tables(args, slot_steps.numel(), group_hyper.size(0), max_exp_avg_sq.has_value());
  const CpuLoops& loops = cpu_loops();
  torch::stable::parallel_for(
      0, args.numel, kGrainNumel, [&](int64_t begin, int64_t end) { loops.adamw(args, begin, end); });
}

void reduce_slices(Tensor out, Tensor slices, int64_t divisor, bool accumulate) {
  const ReduceArgs args = check_reduce_slices(out, slices, divisor, accumulate);
  const CpuLoops& loops = cpu_loops();
  torch::stable::parallel_for(
      0, args.numel, kGrainNumel, [&](int64_t begin, int64_t end) { loops.reduce_slices(args, begin, end); });
}

void flatten(Tensor out, std::vector<Tensor> tensors, std::vector<int64_t> offsets) {
  std::vector<FlattenEntry> entries;
  const FlattenArgs args = check_flatten(out, tensors, offsets, entries);
  const CpuLoops& loops = cpu_loops();
  torch::stable::parallel_for(
      0, args.numel, kGrainNumel, [&](int64_t begin, int64_t end) { loops.flatten(args, begin, end); });
}

std::string cpu_instruction_set() { return cpu_loops().instruction_set; }

void force_cpu_instruction_set(std::string name) {
  STD_TORCH_CHECK(
      force_cpu_loops(name.c_str()), "force_cpu_instruction_set: name must be avx512, avx2 or scalar and run on this ",
      "machine, got '", name, "'");
}

}  // namespace
}  // namespace zero_shard

STABLE_TORCH_LIBRARY_IMPL(zero_shard, CPU, library) {
  library.impl("flatten_", TORCH_BOX(&zero_shard::flatten));
  library.impl("reduce_slices_", TORCH_BOX(&zero_shard::reduce_slices));
  library.impl("adamw_", TORCH_BOX(&zero_shard::adamw));
}

STABLE_TORCH_LIBRARY_IMPL(zero_shard, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&zero_shard::cpu_instruction_set));
  library.impl("force_cpu_instruction_set", TORCH_BOX(&zero_shard::force_cpu_instruction_set));
}
