// The operators on the CPU: checks, table contents, threads.
#include <string>

#include "adamw_math.h"
#include "block_codec.h"
#include "cpu/loops.h"
#include "register.h"

namespace zero_shard {
namespace {

int64_t tiles_of(int64_t numel) { return (numel + kTileNumel - 1) / kTileNumel; }

// Calls body(first_tile, end_tile) on several threads.
template <class Body>
void for_tiles(int64_t numel, const Body& body) {
  torch::stable::parallel_for(0, tiles_of(numel), 1, body);
}

// Calls body(begin, end), in elements, on several threads.
template <class Body>
void for_ranges(int64_t numel, const Body& body) {
  for_tiles(numel, [&](int64_t first_tile, int64_t end_tile) {
    const int64_t end = end_tile * kTileNumel;
    body(first_tile * kTileNumel, end < numel ? end : numel);
  });
}

// On the CPU the tables can be read, so a wrong one raises instead of writing out of bounds.
void check_segments(const char* op, const Segment* segments, int64_t num_segments, int64_t numel) {
  int64_t end = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    const Segment& segment = segments[s];
    const bool is_right = segment.numel >= 0 && end <= segment.start && segment.start <= numel - segment.numel;
    STD_TORCH_CHECK(
        is_right && segment.param_start >= 0, op, ": segments[", s, "] must be ascending, disjoint, within ", numel,
        " elements, with a param_start of at least 0, got start ", segment.start, ", numel ", segment.numel,
        ", param_start ", segment.param_start);
    end = segment.start + segment.numel;
  }
}

void check_slots(const AdamwArgs& args, int64_t num_slots, int64_t num_groups, bool has_max) {
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const int64_t slot = args.segments[s].slot;
    STD_TORCH_CHECK(
        0 <= slot && slot < num_slots, "adamw_: segments[", s, "] must be within ", num_slots, " slots, got slot ",
        slot);
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

void check_blocks(const AdamwArgs& args) {
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const Segment& segment = args.segments[s];
    STD_TORCH_CHECK(
        segment.start % kBlockNumel == 0 && segment.param_start % kBlockNumel == 0, "adamw_: segments[", s,
        "] must start at multiples of ", kBlockNumel, " for int8 moments, got start ", segment.start, ", param_start ",
        segment.param_start);
  }
}

void check_coverage(const AdamwArgs& args) {
  int64_t run = 0;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const Segment& segment = args.segments[s];
    if (segment.numel == 0 || !args.slot_is_active[segment.slot]) {
      continue;
    }
    while (run < args.num_runs && args.runs[run].start + args.runs[run].numel <= segment.start) {
      ++run;
    }
    const bool is_inside = run < args.num_runs && args.runs[run].start <= segment.start &&
                           segment.start + segment.numel <= args.runs[run].start + args.runs[run].numel;
    STD_TORCH_CHECK(
        is_inside, "adamw_: grads must hold each active segment within one tensor, got none for segments[", s,
        "] with start ", segment.start, ", numel ", segment.numel);
  }
}

void adamw(const AdamwTensors& tensors) {
  std::vector<Run> runs;
  const AdamwArgs args = check_adamw(tensors, runs);
  check_segments("adamw_", args.segments, args.num_segments, args.numel);
  check_slots(args, tensors.slot_steps.numel(), tensors.group_hyper.size(0), tensors.max_exp_avg_sq.has_value());
  check_coverage(args);
  if (args.moment_dtype == DType::kInt8) {
    check_blocks(args);
  }
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) {
    return;
  }
  const CpuLoops& loops = cpu_loops();
  for_ranges(args.numel, [&](int64_t begin, int64_t end) { loops.adamw(args, begin, end); });
}

// Runs body(first_tile, end_tile), which leaves partial sums if any are wanted, and adds those.
template <class Body>
void with_sums(const char* op, SumArgs& sum, DType dtype, const Body& body) {
  check_segments(op, sum.segments, sum.num_segments, sum.numel);
  std::vector<double> partials(sum.sums == nullptr ? 0 : 2 * (tiles_of(sum.numel) + sum.num_segments));
  sum.partials = partials.data();
  for_tiles(sum.numel, body);
  if (sum.sums != nullptr) {
    cpu_loops().finish_sums(sum, dtype);
  }
}

void quantize(Tensor wire, Tensor values) {
  const QuantizeArgs args = check_quantize(wire, values);
  const CpuLoops& loops = cpu_loops();
  for_ranges(args.numel, [&](int64_t begin, int64_t end) { loops.quantize(args, begin, end); });
}

void reduce_slices(
    Tensor out, Tensor slices, int64_t divisor, bool accumulate, std::optional<Tensor> segments,
    std::optional<Tensor> sums, std::optional<Tensor> own, int64_t own_rank) {
  ReduceArgs args = check_reduce_slices(out, slices, divisor, accumulate, segments, sums, own, own_rank);
  const CpuLoops& loops = cpu_loops();
  with_sums("reduce_slices_", args.sum, args.slice_dtype, [&](int64_t first_tile, int64_t end_tile) {
    loops.reduce_slices(args, first_tile, end_tile);
  });
}

void sum_squares(
    Tensor sums, std::vector<Tensor> tensors, std::vector<int64_t> offsets, int64_t numel, Tensor segments) {
  std::vector<Run> runs;
  SumSquaresArgs args = check_sum_squares(sums, tensors, offsets, numel, segments, runs);
  const CpuLoops& loops = cpu_loops();
  with_sums("sum_squares_", args.sum, args.dtype, [&](int64_t first_tile, int64_t end_tile) {
    loops.sum_squares(args, first_tile, end_tile);
  });
}

void sum_pairs(Tensor total, Tensor pairs) {
  check_sum_pairs(total, pairs);
  cpu_loops().sum_pairs(
      static_cast<double*>(total.data_ptr()), static_cast<const double*>(pairs.data_ptr()), pairs.size(0));
}

void flatten(Tensor flat, std::vector<Tensor> tensors, std::vector<int64_t> offsets, std::optional<Tensor> scale) {
  std::vector<FlattenEntry> entries;
  const FlattenArgs args = check_flatten(flat, tensors, offsets, scale, entries);
  const CpuLoops& loops = cpu_loops();
  for_ranges(args.numel, [&](int64_t begin, int64_t end) { loops.flatten(args, begin, end); });
}

void unflatten(std::vector<Tensor> tensors, Tensor flat, std::vector<int64_t> offsets, std::optional<Tensor> scale) {
  std::vector<FlattenEntry> entries;
  const FlattenArgs args = check_unflatten(tensors, flat, offsets, scale, entries);
  const CpuLoops& loops = cpu_loops();
  for_ranges(args.numel, [&](int64_t begin, int64_t end) { loops.unflatten(args, begin, end); });
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
  library.impl("unflatten_", TORCH_BOX(&zero_shard::unflatten));
  library.impl("quantize_", TORCH_BOX(&zero_shard::quantize));
  library.impl("reduce_slices_", TORCH_BOX(&zero_shard::reduce_slices));
  library.impl("sum_squares_", TORCH_BOX(&zero_shard::sum_squares));
  library.impl("sum_pairs_", TORCH_BOX(&zero_shard::sum_pairs));
  library.impl("adamw_", TORCH_BOX(&zero_shard::adamw_entry<zero_shard::adamw>));
}

STABLE_TORCH_LIBRARY_IMPL(zero_shard, CompositeExplicitAutograd, library) {
  library.impl("cpu_instruction_set", TORCH_BOX(&zero_shard::cpu_instruction_set));
  library.impl("force_cpu_instruction_set", TORCH_BOX(&zero_shard::force_cpu_instruction_set));
}
