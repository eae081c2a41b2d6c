// A row of tensors that come into an operator together, with the places they take in a flat buffer.
//
// Note [Tensors by address]
// A list of tensors costs several heap allocations for each on its way from Python to here, and there may be tens of
// thousands. So the list may also be one int64 tensor [2, R] on the CPU: addresses, which Python calls Tensor._cdata,
// and offsets; the list of offsets is empty then. A tensor is one pointer, to its implementation, and a handle points
// to a tensor: an array of addresses is an array of tensors. Python holds them during the call.
#pragma once

#include <vector>

#include "register.h"

namespace zero_shard {

using torch::headeronly::ScalarType;

// A tensor that somebody else holds.
class TensorView {
 public:
  explicit TensorView(AtenTensorHandle handle) : handle_(handle) {}

  ScalarType scalar_type() const;
  bool is_cpu() const;
  int64_t get_device_index() const;
  bool is_contiguous() const;
  int64_t numel() const;
  int64_t dim() const;
  int64_t size(int64_t dim) const;
  int64_t stride(int64_t dim) const;
  void* data_ptr() const;

  // For messages.
  Tensor tensor() const;

 private:
  AtenTensorHandle handle_;
};

class TensorRow {
 public:
  // Backed by the arguments, which must outlive it.
  TensorRow(const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets);

  size_t size() const { return num_tensors_; }
  bool empty() const { return num_tensors_ == 0; }
  size_t num_offsets() const { return num_offsets_; }
  int64_t offset(size_t i) const { return offsets_[i]; }
  TensorView operator[](size_t i) const;

 private:
  const std::vector<Tensor>& tensors_;
  int64_t* addresses_ = nullptr;
  const int64_t* offsets_;
  size_t num_tensors_;
  size_t num_offsets_;
};

}  // namespace zero_shard
