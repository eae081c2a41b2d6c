// The checks that every device shares.
#include "register.h"

#include <string>

#include "adamw_math.h"
#include "block_codec.h"
#include "checker.h"
#include "wire_codec.h"

namespace zero_shard {
namespace {

constexpr int64_t kSegmentColumns = 4;

// Tensors of one dtype, each one run of memory; and the runs themselves. There may be tens of thousands.
void check_runs(
    const Checker& check, const char* name, const std::vector<Tensor>& tensors, std::vector<ScalarType> types,
    const std::vector<int64_t>& offsets, std::vector<Run>& runs) {
  runs.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const ScalarType type = tensor.scalar_type();
    if (!is_one_of(type, types) || !check.is_on_device(tensor) || !tensor.is_contiguous()) {
      check.tensor(std::string(name) + "[" + std::to_string(i) + "]", tensor, types, shape_of(tensor));
    }
    if (i == 0) {
      types = {type};
    }
    if (const int64_t numel = tensor.numel(); numel != 0) {
      runs.push_back({tensor.data_ptr(), offsets[i], numel});
    }
  }
}

void check_weight(const Checker& check, const AdamwTensors& tensors) {
  const ScalarType type = tensors.param.scalar_type();
  const std::string where = std::string("for a ") + name_of(type) + " param";
  if (tensors.low.has_value()) {
    if (type != ScalarType::BFloat16 && type != ScalarType::Half) {
      check.absent("low", tensors.low, where);
    }
    const ScalarType low_type = type == ScalarType::BFloat16 ? ScalarType::Short : ScalarType::Float;
    check.tensor("low", *tensors.low, {low_type}, {tensors.param.numel()});
  }
  if (tensors.is_stochastic) {
    STD_TORCH_CHECK(type == ScalarType::BFloat16, "adamw_: stochastic must be False ", where, ", got True");
    check.absent("low", tensors.low, "where stochastic is True");
  }
}

void check_moments(const Checker& check, const AdamwTensors& tensors, ScalarType compute) {
  const int64_t numel = tensors.param.numel();
  if (compute == ScalarType::Double) {
    check.tensor("exp_avg", tensors.exp_avg, {compute}, {numel});
  } else {
    check.tensor("exp_avg", tensors.exp_avg, {compute, ScalarType::BFloat16, ScalarType::Char}, {numel});
  }
  const ScalarType type = tensors.exp_avg.scalar_type();
  const std::string where = std::string("for ") + name_of(type) + " moments";
  if (type == ScalarType::Char) {
    const int64_t num_blocks = (numel + kBlockNumel - 1) / kBlockNumel;
    check.tensor("exp_avg_sq", tensors.exp_avg_sq, {ScalarType::Byte}, {numel});
    check.absent("max_exp_avg_sq", tensors.max_exp_avg_sq, where);
    check.present("exp_avg_scale", tensors.exp_avg_scale, where);
    check.present("exp_avg_sq_scale", tensors.exp_avg_sq_scale, where);
    check.tensor("exp_avg_scale", *tensors.exp_avg_scale, {ScalarType::Float}, {num_blocks});
    check.tensor("exp_avg_sq_scale", *tensors.exp_avg_sq_scale, {ScalarType::Float}, {num_blocks});
    return;
  }
  check.tensor("exp_avg_sq", tensors.exp_avg_sq, {type}, {numel});
  if (tensors.max_exp_avg_sq.has_value()) {
    check.tensor("max_exp_avg_sq", *tensors.max_exp_avg_sq, {type}, {numel});
  }
  check.absent("exp_avg_scale", tensors.exp_avg_scale, where);
  check.absent("exp_avg_sq_scale", tensors.exp_avg_sq_scale, where);
}

void check_segments(const Checker& check, const Tensor& segments) {
  check.tensor("segments", segments, {ScalarType::Long}, {segments.numel() / kSegmentColumns, kSegmentColumns});
}

void check_tables(const Checker& check, const AdamwTensors& tensors) {
  const int64_t num_slots = tensors.slot_steps.numel();
  const int64_t num_groups = tensors.group_hyper.numel() / kNumHyper;
  check_segments(check, tensors.segments);
  check.tensor("slot_steps", tensors.slot_steps, {ScalarType::Float}, {num_slots});
  check.tensor("slot_is_active", tensors.slot_is_active, {ScalarType::Byte}, {num_slots});
  check.tensor("slot_groups", tensors.slot_groups, {ScalarType::Int}, {num_slots});
  check.tensor("slot_numbers", tensors.slot_numbers, {ScalarType::Long}, {num_slots});
  check.tensor("group_hyper", tensors.group_hyper, {ScalarType::Double}, {num_groups, kNumHyper});
  if (tensors.grad_scale.has_value()) {
    check.tensor("grad_scale", *tensors.grad_scale, {ScalarType::Float, ScalarType::Double}, {});
  }
  if (tensors.found_inf.has_value()) {
    check.tensor("found_inf", *tensors.found_inf, {ScalarType::Float}, {});
  }
}

SumArgs check_sums(const Checker& check, const Tensor& sums, const Tensor& segments, int64_t numel) {
  check_segments(check, segments);
  check.tensor("sums", sums, {ScalarType::Double}, {segments.size(0), 2});
  SumArgs args{};
  args.numel = numel;
  args.segments = static_cast<const Segment*>(segments.data_ptr());
  args.num_segments = segments.size(0);
  args.sums = static_cast<double*>(sums.data_ptr());
  return args;
}

// Joins neighbouring dimensions that are one run of memory and drops those of length 1; false if too many are left.
bool describe_dims(const Tensor& tensor, FlattenEntry& entry) {
  int64_t num_dims = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t length = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (length == 1) {
      continue;
    }
    if (num_dims > 0 && entry.strides[num_dims - 1] == length * stride) {
      entry.lengths[num_dims - 1] *= length;
      entry.strides[num_dims - 1] = stride;
      continue;
    }
    if (num_dims == kMaxDims) {
      return false;
    }
    entry.lengths[num_dims] = length;
    entry.strides[num_dims] = stride;
    ++num_dims;
  }
  const bool is_contiguous = num_dims == 0 || (num_dims == 1 && entry.strides[0] == 1);
  entry.num_dims = is_contiguous ? 0 : num_dims;
  return true;
}

FlattenArgs check_entries(
    const Checker& check, const Tensor& flat, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets,
    const std::optional<Tensor>& scale, std::vector<FlattenEntry>& entries) {
  check.tensor("flat", flat, float_types(), {flat.numel()});
  if (scale.has_value()) {
    check.tensor("scale", *scale, {ScalarType::Float}, {});
  }
  entries.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    STD_TORCH_CHECK(
        is_one_of(tensor.scalar_type(), float_types()) && check.is_on_device(tensor), check.op, ": tensors[", i,
        "] must be ", names_of(float_types()), " on ", device_text(flat), ", got ", text_of(tensor));
  }
  check.offsets("offsets", offsets, tensors, "tensors", "flat", flat.numel());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.numel() == 0) {
      continue;
    }
    FlattenEntry entry{};
    entry.data = tensor.data_ptr();
    entry.start = offsets[i];
    entry.numel = tensor.numel();
    entry.dtype = static_cast<int64_t>(dtype_of(tensor.scalar_type()));
    STD_TORCH_CHECK(
        describe_dims(tensor, entry), check.op, ": tensors[", i, "] must have at most ", kMaxDims,
        " dimensions that are not one run of memory with their neighbour, got ", text_of(tensor), " with strides ",
        text_of(strides_of(tensor)));
    entries.push_back(entry);
  }
  FlattenArgs args{};
  args.flat = flat.data_ptr();
  args.flat_dtype = dtype_of(flat.scalar_type());
  args.numel = flat.numel();
  args.entries = entries.data();
  args.num_entries = static_cast<int64_t>(entries.size());
  args.scale = static_cast<const float*>(pointer_to(scale));
  return args;
}

}  // namespace

AdamwArgs check_adamw(const AdamwTensors& tensors, std::vector<Run>& runs) {
  const Tensor& param = tensors.param;
  const Checker check{"adamw_", param};
  const int64_t numel = param.numel();
  check.tensor("param", param, float_types(), {numel});
  const ScalarType type = param.scalar_type();
  const ScalarType compute = type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const std::vector<ScalarType> grad_types =
      type == compute ? std::vector<ScalarType>{compute} : std::vector<ScalarType>{compute, type};
  check.offsets("grad_offsets", tensors.grad_offsets, tensors.grads, "grads", "param", numel);
  check_runs(check, "grads", tensors.grads, grad_types, tensors.grad_offsets, runs);
  check_weight(check, tensors);
  check_moments(check, tensors, compute);
  check_tables(check, tensors);

  AdamwArgs args{};
  args.numel = numel;
  args.param_dtype = dtype_of(type);
  args.grad_dtype = dtype_of(tensors.grads.empty() ? compute : tensors.grads[0].scalar_type());
  args.moment_dtype = dtype_of(tensors.exp_avg.scalar_type());
  args.is_stochastic = tensors.is_stochastic;
  args.param = param.data_ptr();
  args.low = pointer_to(tensors.low);
  args.runs = runs.data();
  args.num_runs = static_cast<int64_t>(runs.size());
  args.exp_avg = tensors.exp_avg.data_ptr();
  args.exp_avg_sq = tensors.exp_avg_sq.data_ptr();
  args.max_exp_avg_sq = pointer_to(tensors.max_exp_avg_sq);
  args.exp_avg_scale = static_cast<float*>(pointer_to(tensors.exp_avg_scale));
  args.exp_avg_sq_scale = static_cast<float*>(pointer_to(tensors.exp_avg_sq_scale));
  args.segments = static_cast<const Segment*>(tensors.segments.data_ptr());
  args.num_segments = tensors.segments.size(0);
  args.slot_steps = static_cast<const float*>(tensors.slot_steps.data_ptr());
  args.slot_is_active = static_cast<const uint8_t*>(tensors.slot_is_active.data_ptr());
  args.slot_groups = static_cast<const int32_t*>(tensors.slot_groups.data_ptr());
  args.slot_numbers = static_cast<const int64_t*>(tensors.slot_numbers.data_ptr());
  args.group_hyper = static_cast<const double*>(tensors.group_hyper.data_ptr());
  args.grad_scale = pointer_to(tensors.grad_scale);
  args.is_grad_scale_double = tensors.grad_scale.has_value() && tensors.grad_scale->scalar_type() == ScalarType::Double;
  args.found_inf = static_cast<const float*>(pointer_to(tensors.found_inf));
  return args;
}

QuantizeArgs check_quantize(const Tensor& wire, const Tensor& values) {
  const Checker check{"quantize_", values};
  const int64_t numel = values.numel();
  check.tensor("values", values, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, {numel});
  STD_TORCH_CHECK(
      numel % kBlockNumel == 0, "quantize_: values must have a multiple of ", kBlockNumel, " elements, got ", numel);
  check.tensor("wire", wire, {ScalarType::Byte}, {numel / kBlockNumel * kWireBlockNbytes});

  QuantizeArgs args{};
  args.wire = wire.data_ptr();
  args.values = values.data_ptr();
  args.numel = numel;
  args.dtype = dtype_of(values.scalar_type());
  return args;
}

ReduceArgs check_reduce_slices(
    const Tensor& out, const Tensor& slices, int64_t divisor, bool accumulate, const std::optional<Tensor>& segments,
    const std::optional<Tensor>& sums, const std::optional<Tensor>& own, int64_t own_rank) {
  const bool is_matrix = slices.dim() == 2 && slices.size(0) >= 1;
  const bool is_wire = slices.scalar_type() == ScalarType::Byte;
  STD_TORCH_CHECK(
      is_matrix && slices.is_contiguous() && (is_wire || is_one_of(slices.scalar_type(), float_types())),
      "reduce_slices_: slices must be contiguous floating or uint8 [W, N] with W >= 1, got ", text_of(slices));
  STD_TORCH_CHECK(
      !is_wire || slices.size(1) % kWireBlockNbytes == 0, "reduce_slices_: uint8 slices must be whole blocks of ",
      kWireBlockNbytes, " bytes, got ", text_of(slices));
  const bool is_double = slices.scalar_type() == ScalarType::Double;
  const Checker check{"reduce_slices_", slices};
  const int64_t numel = is_wire ? slices.size(1) / kWireBlockNbytes * kBlockNumel : slices.size(1);
  check.tensor("out", out, {is_double ? ScalarType::Double : ScalarType::Float}, {numel});
  STD_TORCH_CHECK(divisor >= 1, "reduce_slices_: divisor must be at least 1, got ", divisor);

  ReduceArgs args{};
  args.out = out.data_ptr();
  args.slices = slices.data_ptr();
  args.world_size = slices.size(0) + (own.has_value() ? 1 : 0);
  if (own.has_value()) {
    check.tensor("own", *own, {slices.scalar_type()}, {slices.size(1)});
    STD_TORCH_CHECK(
        own_rank >= 0 && own_rank < args.world_size, "reduce_slices_: own_rank must be at least 0 and below ",
        args.world_size, ", got ", own_rank);
    args.own = own->data_ptr();
    args.own_rank = own_rank;
  }
  args.numel = numel;
  args.slice_dtype = is_wire ? DType::kInt8 : dtype_of(slices.scalar_type());
  args.divisor = divisor;
  args.is_accumulate = accumulate;
  args.sum.numel = numel;
  if (sums.has_value()) {
    check.present("segments", segments, "where sums are");
    args.sum = check_sums(check, *sums, *segments, numel);
  } else {
    check.absent("segments", segments, "where sums are not given");
  }
  return args;
}

SumSquaresArgs check_sum_squares(
    const Tensor& sums, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets, int64_t numel,
    const Tensor& segments, std::vector<Run>& runs) {
  const Checker check{"sum_squares_", sums};
  STD_TORCH_CHECK(numel >= 0, "sum_squares_: numel must be at least 0, got ", numel);
  SumSquaresArgs args{};
  args.sum = check_sums(check, sums, segments, numel);
  check.offsets("offsets", offsets, tensors, "tensors", "the shard", numel);
  check_runs(check, "tensors", tensors, float_types(), offsets, runs);
  args.dtype = tensors.empty() ? DType::kFloat32 : dtype_of(tensors[0].scalar_type());
  args.runs = runs.data();
  args.num_runs = static_cast<int64_t>(runs.size());
  return args;
}

void check_sum_pairs(const Tensor& total, const Tensor& pairs) {
  const Checker check{"sum_pairs_", total};
  check.tensor("total", total, {ScalarType::Double}, {2});
  check.tensor("pairs", pairs, {ScalarType::Double}, {pairs.numel() / 2, 2});
}

FlattenArgs check_flatten(
    const Tensor& flat, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets,
    const std::optional<Tensor>& scale, std::vector<FlattenEntry>& entries) {
  return check_entries(Checker{"flatten_", flat}, flat, tensors, offsets, scale, entries);
}

FlattenArgs check_unflatten(
    const std::vector<Tensor>& tensors, const Tensor& flat, const std::vector<int64_t>& offsets,
    const std::optional<Tensor>& scale, std::vector<FlattenEntry>& entries) {
  const FlattenArgs args = check_entries(Checker{"unflatten_", flat}, flat, tensors, offsets, scale, entries);
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int64_t dim = 0; dim < tensors[i].dim(); ++dim) {
      STD_TORCH_CHECK(
          tensors[i].stride(dim) != 0 || tensors[i].size(dim) <= 1, "unflatten_: tensors[", i,
          "] must have no two elements in one place, got strides ", text_of(strides_of(tensors[i])));
    }
  }
  return args;
}

}  // namespace zero_shard
