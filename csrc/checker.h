// Checks of one call's tensors, and the words for what is wrong with them.
#pragma once

#include <string>
#include <vector>

#include "register.h"

namespace zero_shard {

using torch::headeronly::ScalarType;

bool is_one_of(ScalarType type, const std::vector<ScalarType>& types);
const std::vector<ScalarType>& float_types();

const char* name_of(ScalarType type);
std::string names_of(const std::vector<ScalarType>& types);
std::string text_of(const std::vector<int64_t>& numbers);
std::string device_text(const Tensor& tensor);
std::string text_of(const Tensor& tensor);  // as in "float32[3, 5] on cpu"
std::string text_of(const std::optional<Tensor>& tensor);
std::vector<int64_t> shape_of(const Tensor& tensor);
std::vector<int64_t> strides_of(const Tensor& tensor);

// Callers have checked that it is a type which the kernels know.
DType dtype_of(ScalarType type);
void* pointer_to(const std::optional<Tensor>& tensor);

// What is the same for all arguments of one call.
class Checker {
 public:
  const char* const op;

  // All tensors must be on the device of this one.
  Checker(const char* op, const Tensor& first);

  bool is_on_device(const Tensor& tensor) const;

  // Contiguous, of one of the types and of this shape.
  void tensor(
      const std::string& name, const Tensor& tensor, const std::vector<ScalarType>& types,
      const std::vector<int64_t>& shape) const;
  void absent(const char* name, const std::optional<Tensor>& tensor, const std::string& where) const;
  void present(const char* name, const std::optional<Tensor>& tensor, const std::string& where) const;
  // Tensor i takes as many elements as it has from offsets[i] on, of the numel elements of what is called whole.
  void offsets(
      const char* name, const std::vector<int64_t>& offsets, const std::vector<Tensor>& tensors,
      const char* tensors_name, const char* whole, int64_t numel) const;

 private:
  const Tensor& first_;
  bool is_cpu_;
  int64_t device_index_;
};

}  // namespace zero_shard
