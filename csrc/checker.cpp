#include "checker.h"

#include <algorithm>
#include <sstream>

namespace zero_shard {

bool is_one_of(ScalarType type, const std::vector<ScalarType>& types) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

const std::vector<ScalarType>& float_types() {
  static const std::vector<ScalarType> types = {
      ScalarType::Float, ScalarType::Double, ScalarType::BFloat16, ScalarType::Half};
  return types;
}

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
    case ScalarType::Char:
      return "int8";
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

std::string names_of(const std::vector<ScalarType>& types) {
  std::string names;
  for (const ScalarType type : types) {
    names += (names.empty() ? "" : " or ") + std::string(name_of(type));
  }
  return names;
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

std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index());
}

std::string text_of(const Tensor& tensor) {
  return name_of(tensor.scalar_type()) + text_of(shape_of(tensor)) + " on " + device_text(tensor);
}

std::string text_of(const std::optional<Tensor>& tensor) { return tensor.has_value() ? text_of(*tensor) : "None"; }

std::vector<int64_t> shape_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }
std::vector<int64_t> strides_of(const Tensor& tensor) { return {tensor.strides().begin(), tensor.strides().end()}; }

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Char:
      return DType::kInt8;
    default:
      return DType::kFloat32;
  }
}

void* pointer_to(const std::optional<Tensor>& tensor) { return tensor.has_value() ? tensor->data_ptr() : nullptr; }

Checker::Checker(const char* op, const Tensor& first)
    : op(op), first_(first), is_cpu_(first.is_cpu()), device_index_(first.get_device_index()) {}

bool Checker::is_on_device(const Tensor& tensor) const {
  return tensor.is_cpu() == is_cpu_ && (is_cpu_ || tensor.get_device_index() == device_index_);
}

void Checker::tensor(
    const std::string& name, const Tensor& tensor, const std::vector<ScalarType>& types,
    const std::vector<int64_t>& shape) const {
  const bool is_right = is_one_of(tensor.scalar_type(), types) && shape_of(tensor) == shape && is_on_device(tensor);
  STD_TORCH_CHECK(
      is_right, op, ": ", name, " must be ", names_of(types), text_of(shape), " on ", device_text(first_), ", got ",
      text_of(tensor));
  STD_TORCH_CHECK(
      tensor.is_contiguous(), op, ": ", name, " must be contiguous, got strides ", text_of(strides_of(tensor)));
}

void Checker::absent(const char* name, const std::optional<Tensor>& tensor, const std::string& where) const {
  STD_TORCH_CHECK(!tensor.has_value(), op, ": ", name, " must be None ", where, ", got ", text_of(tensor));
}

void Checker::present(const char* name, const std::optional<Tensor>& tensor, const std::string& where) const {
  STD_TORCH_CHECK(tensor.has_value(), op, ": ", name, " must be given ", where, ", got None");
}

void Checker::offsets(
    const char* name, const std::vector<int64_t>& offsets, const std::vector<Tensor>& tensors, const char* tensors_name,
    const char* whole, int64_t numel) const {
  STD_TORCH_CHECK(
      offsets.size() == tensors.size(), op, ": ", name, " must have one entry for each of the ", tensors.size(), " ",
      tensors_name, ", got ", offsets.size());
  int64_t end = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t last = numel - tensors[i].numel();
    STD_TORCH_CHECK(
        end <= offsets[i] && offsets[i] <= last, op, ": ", name, "[", i, "] must lie between ", end, " and ", last,
        " (ascending, disjoint, inside ", whole, "), got ", offsets[i]);
    end = offsets[i] + tensors[i].numel();
  }
}

}  // namespace zero_shard
