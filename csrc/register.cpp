// Schemas, and the checks that every device shares.
#include "register.h"

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <string>

#include "adamw_math.h"

namespace zero_shard {
namespace {

using torch::headeronly::ScalarType;

constexpr std::initializer_list<ScalarType> kFloatTypes = {
    ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half};
constexpr int64_t kSegmentColumns = 3;

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

std::string text_of(const std::vector<int64_t>& numbers) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    text << (i == 0 ? "" : ", ") << numbers[i];
  }
  text << "]";
  return text.str();
}

std::vector<int64_t> shape_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }
std::vector<int64_t> strides_of(const Tensor& tensor) { return {tensor.strides().begin(), tensor.strides().end()}; }

std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index());
}

bool is_on_device_of(const Tensor& tensor, const Tensor& other) {
  return tensor.is_cpu() == other.is_cpu() && tensor.get_device_index() == other.get_device_index();
}

bool is_one_of(ScalarType type, const std::vector<ScalarType>& types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

std::string names_of(const std::vector<ScalarType>& types) {
  std::string names;
  for (const ScalarType type : types) {
    names += (names.empty() ? "" : " or ") + std::string(name_of(type));
  }
  return names;
}

// What is the same for all arguments of one call.
struct Checker {
  const char* op;
  const Tensor& first;  // the tensor whose device all must share

  void tensor(
      const char* name, const Tensor& tensor, const std::vector<ScalarType>& types,
      const std::vector<int64_t>& shape) const {
    const bool is_right =
        is_one_of(tensor.scalar_type(), types) && shape_of(tensor) == shape && is_on_device_of(tensor, first);
    STD_TORCH_CHECK(
        is_right, op, ": ", name, " must be ", names_of(types), text_of(shape), " on ", device_text(first), ", got ",
        name_of(tensor.scalar_type()), text_of(shape_of(tensor)), " on ", device_text(tensor));
    STD_TORCH_CHECK(
        tensor.is_contiguous(), op, ": ", name, " must be contiguous, got strides ", text_of(strides_of(tensor)));
  }
};

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return DType::kFloat32;  // callers have checked that nothing else is left
  }
}

void* pointer_to(const std::optional<Tensor>& tensor) { return tensor.has_value() ? tensor->data_ptr() : nullptr; }

// Whether the elements fill one contiguous range of memory, in any order of dimensions.
bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, length] : dims) {
    if (length != 1) {
      if (stride != expected) {
        return false;
      }
      expected *= length;
    }
  }
  return true;
}

void check_low(const Checker& check, const Tensor& low, ScalarType param_type, int64_t numel) {
  const bool has_low = param_type == ScalarType::BFloat16 || param_type == ScalarType::Half;
  STD_TORCH_CHECK(
      has_low, "adamw_: low must be None for a ", name_of(param_type), " param, got ", name_of(low.scalar_type()),
      text_of(shape_of(low)), " on ", device_text(low));
  check.tensor("low", low, {param_type == ScalarType::BFloat16 ? ScalarType::Short : ScalarType::Float}, {numel});
}

}  // namespace

AdamwArgs check_adamw(
    const Tensor& param, const std::optional<Tensor>& low, const Tensor& grad, const Tensor& exp_avg,
    const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq, const Tensor& segments,
    const Tensor& slot_steps, const Tensor& slot_is_active, const Tensor& slot_groups, const Tensor& group_hyper,
    const std::optional<Tensor>& grad_scale) {
  const Checker check{"adamw_", param};
  const int64_t numel = param.numel();
  check.tensor("param", param, kFloatTypes, {numel});
  const bool is_double = param.scalar_type() == ScalarType::Double;
  const ScalarType compute = is_double ? ScalarType::Double : ScalarType::Float;
  check.tensor("grad", grad, {compute}, {numel});
  if (is_double) {
    check.tensor("exp_avg", exp_avg, {compute}, {numel});
  } else {
    check.tensor("exp_avg", exp_avg, {compute, ScalarType::BFloat16}, {numel});
  }
  check.tensor("exp_avg_sq", exp_avg_sq, {exp_avg.scalar_type()}, {numel});
  if (max_exp_avg_sq.has_value()) {
    check.tensor("max_exp_avg_sq", *max_exp_avg_sq, {exp_avg.scalar_type()}, {numel});
  }
  if (low.has_value()) {
    check_low(check, *low, param.scalar_type(), numel);
  }
  if (grad_scale.has_value()) {
    check.tensor("grad_scale", *grad_scale, {ScalarType::Float, ScalarType::Double}, {});
  }
  const int64_t num_segments = segments.numel() / kSegmentColumns;
  const int64_t num_slots = slot_steps.numel();
  check.tensor("segments", segments, {ScalarType::Long}, {num_segments, kSegmentColumns});
  check.tensor("slot_steps", slot_steps, {ScalarType::Float}, {num_slots});
  check.tensor("slot_is_active", slot_is_active, {ScalarType::Byte}, {num_slots});
  check.tensor("slot_groups", slot_groups, {ScalarType::Int}, {num_slots});
  check.tensor("group_hyper", group_hyper, {ScalarType::Double}, {group_hyper.numel() / kNumHyper, kNumHyper});

  AdamwArgs args{};
  args.numel = numel;
  args.param_dtype = dtype_of(param);
  args.moment_dtype = dtype_of(exp_avg);
  args.param = param.data_ptr();
  args.low = pointer_to(low);
  args.grad = grad.data_ptr();
  args.exp_avg = exp_avg.data_ptr();
  args.exp_avg_sq = exp_avg_sq.data_ptr();
  args.max_exp_avg_sq = pointer_to(max_exp_avg_sq);
  args.segments = static_cast<const Segment*>(segments.data_ptr());
  args.num_segments = num_segments;
  args.slot_steps = static_cast<const float*>(slot_steps.data_ptr());
  args.slot_is_active = static_cast<const uint8_t*>(slot_is_active.data_ptr());
  args.slot_groups = static_cast<const int32_t*>(slot_groups.data_ptr());
  args.group_hyper = static_cast<const double*>(group_hyper.data_ptr());
  args.grad_scale = pointer_to(grad_scale);
  args.is_grad_scale_double = grad_scale.has_value() && grad_scale->scalar_type() == ScalarType::Double;
  return args;
}

ReduceArgs check_reduce_slices(const Tensor& out, const Tensor& slices, int64_t divisor, bool accumulate) {
  const bool is_matrix = slices.dim() == 2 && slices.size(0) >= 1;
  STD_TORCH_CHECK(
      is_matrix && slices.is_contiguous() && is_one_of(slices.scalar_type(), kFloatTypes),
      "reduce_slices_: slices must be contiguous floating [W, N] with W >= 1, got ", name_of(slices.scalar_type()),
      text_of(shape_of(slices)), " on ", device_text(slices));
  const bool is_double = slices.scalar_type() == ScalarType::Double;
  const Checker check{"reduce_slices_", slices};
  check.tensor("out", out, {is_double ? ScalarType::Double : ScalarType::Float}, {slices.size(1)});
  STD_TORCH_CHECK(divisor >= 1, "reduce_slices_: divisor must be at least 1, got ", divisor);

  ReduceArgs args{};
  args.out = out.data_ptr();
  args.slices = slices.data_ptr();
  args.world_size = slices.size(0);
  args.numel = slices.size(1);
  args.slice_dtype = dtype_of(slices);
  args.divisor = divisor;
  args.is_accumulate = accumulate;
  return args;
}

FlattenArgs check_flatten(
    const Tensor& out, const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets,
    std::vector<FlattenEntry>& entries) {
  const Checker check{"flatten_", out};
  check.tensor("out", out, kFloatTypes, {out.numel()});
  STD_TORCH_CHECK(
      tensors.size() == offsets.size(), "flatten_: offsets must have one entry for each of the ", tensors.size(),
      " tensors, got ", offsets.size());
  entries.reserve(tensors.size());
  int64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const int64_t numel = tensor.numel();
    STD_TORCH_CHECK(
        is_one_of(tensor.scalar_type(), kFloatTypes) && is_on_device_of(tensor, out), "flatten_: tensors[", i,
        "] must be float32, float64, bfloat16 or float16 on ", device_text(out), ", got ",
        name_of(tensor.scalar_type()), text_of(shape_of(tensor)), " on ", device_text(tensor));
    STD_TORCH_CHECK(
        is_dense(tensor), "flatten_: tensors[", i, "] must be dense, got strides ", text_of(strides_of(tensor)));
    STD_TORCH_CHECK(
        end <= offsets[i] && offsets[i] <= out.numel() - numel, "flatten_: offsets[", i, "] must lie between ", end,
        " and ", out.numel() - numel, " (ascending, disjoint, inside out), got ", offsets[i]);
    end = offsets[i] + numel;
    if (numel != 0) {
      entries.push_back({tensor.data_ptr(), offsets[i], numel, static_cast<int64_t>(dtype_of(tensor))});
    }
  }
  FlattenArgs args{};
  args.out = out.data_ptr();
  args.out_dtype = dtype_of(out);
  args.numel = out.numel();
  args.entries = entries.data();
  args.num_entries = static_cast<int64_t>(entries.size());
  return args;
}

}  // namespace zero_shard

STABLE_TORCH_LIBRARY(zero_shard, library) {
  library.def("flatten_(Tensor(a!) out, Tensor[] tensors, int[] offsets) -> ()");
  library.def("reduce_slices_(Tensor(a!) out, Tensor slices, int divisor, bool accumulate) -> ()");
  library.def(
      "adamw_(Tensor(a!) param, Tensor(b!)? low, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
      "Tensor(e!)? max_exp_avg_sq, Tensor segments, Tensor slot_steps, Tensor slot_is_active, Tensor slot_groups, "
      "Tensor group_hyper, Tensor? grad_scale) -> ()");
  library.def("cpu_instruction_set() -> str");
  library.def("force_cpu_instruction_set(str name) -> ()");
}
