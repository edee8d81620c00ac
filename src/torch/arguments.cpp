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

std::string shape_text(std::span<const std::int64_t> sizes) { return to_string(Shape(sizes)); }

Tensor part_of(const char* where, const Part& part, const Tensor& given) {
  const std::string name(part.name);
  const Tensor tensor = readable(where, name.c_str(), given);
  if (dtype_of(tensor) != part.dtype) {
    fail(Code::invalid_argument, std::string(where) + ": " + name + " must be " +
                                     dtype_text(part.dtype) + ", got " +
                                     dtype_text(dtype_of(tensor)));
  }
  const auto sizes = sizes_of(tensor);
  const auto wanted = part.shape.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end())) {
    fail(Code::invalid_argument, std::string(where) + ": " + name + " must be " +
                                     to_string(part.shape) + ", got " + shape_text(sizes));
  }
  return tensor;
}

}  // namespace

void fail(Code code, const std::string& message) {
  throw std::runtime_error("[" + std::string(to_string(code)) + "] " + message);
}

Dtype dtype_of(const Tensor& tensor) {
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  for (const Pair& pair : pairs()) {
    if (pair.torch == dtype) return pair.ours;
  }
  return Dtype::unknown;
}

std::int32_t torch_dtype(Dtype dtype) {
  for (const Pair& pair : pairs()) {
    if (pair.ours == dtype) return pair.torch;
  }
  fail(Code::unsupported, "stowage: torch has no dtype " + std::string(disk_name(dtype)));
}

std::span<const std::int64_t> sizes_of(const Tensor& tensor) {
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &rank));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  return {sizes, static_cast<std::size_t>(rank)};
}

const char* dtype_text(Dtype dtype) {
  for (const Pair& pair : pairs()) {
    if (pair.ours == dtype) return pair.name;
  }
  return "another dtype";
}

Tensor readable(const char* where, const char* name, const Tensor& given) {
  if (!given.is_cpu()) {
    fail(Code::invalid_argument,
         std::string(where) + ": " + name + " must be on the CPU like the other arguments");
  }
  const Tensor tensor = given.is_contiguous() ? given : torch::stable::contiguous(given);
  if (tensor.const_data_ptr() == nullptr && tensor.numel() > 0) {
    fail(Code::invalid_argument, std::string(where) + ": the memory of " + name +
                                     " must be there, got a tensor whose storage was released");
  }
  return tensor;
}

Tensor empty(std::span<const std::int64_t> sizes, Dtype dtype) {
  std::array<std::int64_t, 64> strides;  // torch's own limit on the rank
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0; step *= sizes[i] > 0 ? sizes[i] : 1) {
    strides[i] = step;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()),
                                                  sizes.data(), strides.data(), torch_dtype(dtype),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Held hold(const char* where, const Tensor& codes, const std::vector<Tensor>& scales,
          std::int64_t storage_key, const Shape& shape) {
  const Storage storage = storage_from_key(storage_key);
  const Layout wanted = layout(storage, shape);
  if (scales.size() + 1 != static_cast<std::size_t>(wanted.count)) {
    fail(Code::invalid_argument, std::string(where) + ": scales of " + to_string(storage) +
                                     " must be " + std::to_string(wanted.count - 1) +
                                     " tensors, got " + std::to_string(scales.size()));
  }
  Held held;
  held.tensors.reserve(scales.size() + 1);
  std::array<const void*, kMaxParts> pointers{};
  for (std::size_t i = 0; i <= scales.size(); ++i) {
    held.tensors.push_back(part_of(where, wanted.parts[i], i == 0 ? codes : scales[i - 1]));
    pointers[i] = held.tensors[i].const_data_ptr();
  }
  held.weight = Weight(storage, shape, std::span(pointers).first(scales.size() + 1));
  return held;
}

}  // namespace stowage::door
