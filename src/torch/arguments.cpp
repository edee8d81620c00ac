// SPDX-License-Identifier: Apache-2.0
// Argument checks. Order: device, then rank, then sizes; freed memory last, since FSDP frees the
// storage of a gathered weight while its tensor lives on, and reading that ends the process.
#include "torch/arguments.h"

#include <torch/csrc/stable/ops.h>

#include <array>

namespace stowage::door {
namespace {

struct Pair {
  Dtype ours;
  std::int32_t torch;
  const char* name;
};

// torch's numbers are asked for, not assumed: they are no part of its stable ABI.
const std::array<Pair, 9>& pairs() {
  static const std::array<Pair, 9> table = {{
      {Dtype::bf16, aoti_torch_dtype_bfloat16(), "bfloat16"},
      {Dtype::f32, aoti_torch_dtype_float32(), "float32"},
      {Dtype::u8, aoti_torch_dtype_uint8(), "uint8"},
      {Dtype::f16, aoti_torch_dtype_float16(), "float16"},
      {Dtype::f64, aoti_torch_dtype_float64(), "float64"},
      {Dtype::i64, aoti_torch_dtype_int64(), "int64"},
      {Dtype::i32, aoti_torch_dtype_int32(), "int32"},
      {Dtype::i8, aoti_torch_dtype_int8(), "int8"},
      {Dtype::boolean, aoti_torch_dtype_bool(), "bool"},
  }};
  return table;
}

Dtype dtype_of(AtenTensorHandle tensor) {
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  for (const Pair& pair : pairs()) {
    if (pair.torch == dtype) return pair.ours;
  }
  return Dtype::unknown;
}

std::span<const std::int64_t> sizes_of(AtenTensorHandle tensor) {
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &rank));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  return {sizes, static_cast<std::size_t>(rank)};
}

bool on_cpu(AtenTensorHandle tensor) {
  static const std::int32_t cpu = aoti_torch_device_type_cpu();
  std::int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device));
  return device == cpu;
}

void check_part(const char* where, const Part& part, const Argument& given) {
  const auto wanted = part.shape.sizes(), sizes = given.sizes();
  const auto rule = [&] {
    return std::string(where) + ": " + std::string(part.name) + " must be ";
  };
  if (given.dtype() != part.dtype) {
    fail(Code::invalid_argument,
         rule() + dtype_text(part.dtype) + ", got " + dtype_text(given.dtype()));
  }
  if (!std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end())) {
    fail(Code::invalid_argument,
         rule() + to_string(part.shape) + ", got " + to_string(Shape(sizes)));
  }
}

}  // namespace

void fail(Code code, const std::string& message) {
  throw std::runtime_error("[" + std::string(to_string(code)) + "] " + message);
}

const char* dtype_text(Dtype dtype) {
  for (const Pair& pair : pairs()) {
    if (pair.ours == dtype) return pair.name;
  }
  return "another dtype";
}

std::int32_t torch_dtype(Dtype dtype) {
  for (const Pair& pair : pairs()) {
    if (pair.ours == dtype) return pair.torch;
  }
  fail(Code::unsupported, "stowage: torch has no dtype " + std::string(disk_name(dtype)));
}

Argument::Argument(const char* where, std::string_view name, const Tensor& tensor) {
  const AtenTensorHandle handle = tensor.get();
  const auto refuse = [&](const char* rule) {
    fail(Code::invalid_argument, std::string(where) + ": " + std::string(name) + rule);
  };
  if (!on_cpu(handle)) refuse(" must be on the CPU like the other arguments, got another device");
  sizes_ = sizes_of(handle);
  dtype_ = dtype_of(handle);
  bool contiguous = false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle, &contiguous));
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &data_));
  if (data_ == nullptr && elements() > 0) {
    refuse(" must have its memory, got a tensor whose storage was released");
  }
  if (!contiguous) {
    copy_ = torch::stable::contiguous(tensor);
    data_ = copy_->const_data_ptr();
  }
}

std::int64_t Argument::elements() const noexcept {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes_) n *= size;
  return n;
}

Tensor empty(std::span<const std::int64_t> sizes, Dtype dtype) {
  static const std::int32_t cpu = aoti_torch_device_type_cpu();
  std::array<std::int64_t, 64> strides;  // torch's own limit on the rank
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0; step *= sizes[i] > 0 ? sizes[i] : 1) {
    strides[i] = step;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()),
                                                  sizes.data(), strides.data(), torch_dtype(dtype),
                                                  cpu, 0, &handle));
  return Tensor(handle);
}

Held::Held(const char* where, const Tensor& codes, const std::vector<Tensor>& scales,
           std::int64_t storage_key, const Shape& shape) {
  const Storage storage = storage_from_key(storage_key);
  const Layout wanted = layout(storage, shape);
  const std::size_t count = scales.size() + 1;
  if (count != static_cast<std::size_t>(wanted.count)) {
    fail(Code::invalid_argument, std::string(where) + ": scales of " + to_string(storage) +
                                     " must be " + std::to_string(wanted.count - 1) +
                                     " tensors, got " + std::to_string(scales.size()));
  }
  std::array<const void*, kMaxParts> pointers{};
  for (std::size_t i = 0; i < count; ++i) {
    const Part& part = wanted.parts[i];
    parts_[i].emplace(where, part.name, i == 0 ? codes : scales[i - 1]);
    check_part(where, part, *parts_[i]);
    pointers[i] = parts_[i]->data();
  }
  weight_ = Weight(storage, shape, std::span(pointers).first(count));
}

}  // namespace stowage::door
