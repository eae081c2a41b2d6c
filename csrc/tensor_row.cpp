#include "tensor_row.h"

#include "checker.h"

namespace zero_shard {

ScalarType TensorView::scalar_type() const {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &type));
  return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(type));
}

bool TensorView::is_cpu() const {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle_, &type));
  return type == aoti_torch_device_type_cpu();
}

int64_t TensorView::get_device_index() const {
  int32_t index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle_, &index));
  return index;
}

bool TensorView::is_contiguous() const {
  bool is_contiguous = false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &is_contiguous));
  return is_contiguous;
}

int64_t TensorView::numel() const {
  int64_t numel = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle_, &numel));
  return numel;
}

int64_t TensorView::dim() const {
  int64_t dim = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &dim));
  return dim;
}

int64_t TensorView::size(int64_t dim) const {
  int64_t size = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(handle_, dim, &size));
  return size;
}

int64_t TensorView::stride(int64_t dim) const {
  int64_t stride = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_stride(handle_, dim, &stride));
  return stride;
}

void* TensorView::data_ptr() const {
  void* pointer = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle_, &pointer));
  return pointer;
}

Tensor TensorView::tensor() const {
  AtenTensorHandle copy = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle_, &copy));
  return Tensor(copy);
}

TensorRow::TensorRow(const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets)
    : tensors_(tensors), offsets_(offsets.data()), num_tensors_(tensors.size()), num_offsets_(offsets.size()) {
  if (!offsets.empty() || tensors.size() != 1 || tensors[0].scalar_type() != ScalarType::Long) {
    return;
  }
  const Tensor& rows = tensors[0];
  STD_TORCH_CHECK(
      rows.is_cpu() && rows.dim() == 2 && rows.size(0) == 2 && rows.is_contiguous(),
      "addresses must be a contiguous int64 [2, R] on cpu, got ", text_of(rows));
  static_assert(sizeof(int64_t) == sizeof(void*), "an address takes one element");
  num_tensors_ = num_offsets_ = static_cast<size_t>(rows.size(1));
  addresses_ = static_cast<int64_t*>(rows.data_ptr());
  offsets_ = addresses_ + num_tensors_;
}

TensorView TensorRow::operator[](size_t i) const {
  return TensorView(addresses_ == nullptr ? tensors_[i].get() : reinterpret_cast<AtenTensorHandle>(addresses_ + i));
}

}  // namespace zero_shard
