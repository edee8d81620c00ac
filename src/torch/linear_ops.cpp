// SPDX-License-Identifier: Apache-2.0
// Ops that multiply: linear and its gradient to the input. Few rows go to our kernels, many to
// torch's own product on tiles of dequantized weight.
#include <array>
#include <optional>

#include "stowage/quantize.h"
#include "torch/arguments.h"
#include "torch/executor.h"
#include "torch/gemm.h"

namespace stowage::door {
namespace {

// The left factor: f32, bf16 or f16, contiguous, [..., columns].
Tensor factor(const char* where, const char* name, const Tensor& given) {
  Tensor x = readable(where, name, given);
  const Dtype dtype = dtype_of(x);
  if (dtype != Dtype::bf16 && dtype != Dtype::f32 && dtype != Dtype::f16) {
    fail(Code::invalid_argument, std::string(where) + ": " + name +
                                     " must be float32, bfloat16 or float16, got " +
                                     dtype_text(dtype));
  }
  if (sizes_of(x).empty()) {
    fail(Code::invalid_argument,
         std::string(where) + ": " + name + " must have at least 1 dimension, got 0");
  }
  return x;
}

// 8-bit and wider codes have the weight's shape, so a wrong x can be told from wrong codes.
void check_columns(const char* where, const char* name, std::span<const std::int64_t> sizes,
                   const Tensor& codes, std::size_t dim, std::int64_t key) {
  if (trait(storage_from_key(key).codes).bits == 4) return;
  const auto shape = sizes_of(codes);
  if (shape.size() != 2) {
    fail(Code::invalid_argument, std::string(where) + ": codes must have 2 dimensions, got " +
                                     std::to_string(shape.size()));
  }
  if (sizes.back() != shape[dim]) {
    fail(Code::invalid_argument, std::string(where) + ": " + name + " must be [..., " +
                                     std::to_string(shape[dim]) + "], got " +
                                     to_string(Shape(sizes)));
  }
}

Tensor bias_of(const char* where, const Tensor& given, Dtype dtype, std::int64_t rows) {
  Tensor bias = readable(where, "bias", given);
  if (dtype_of(bias) != dtype) {
    fail(Code::invalid_argument, std::string(where) + ": bias must be " + dtype_text(dtype) +
                                     " like x, got " + dtype_text(dtype_of(bias)));
  }
  const auto sizes = sizes_of(bias);
  if (sizes.size() != 1 || sizes[0] != rows) {
    fail(Code::invalid_argument, std::string(where) + ": bias must be [" + std::to_string(rows) +
                                     "], got " + to_string(Shape(sizes)));
  }
  return bias;
}

Tensor result(std::span<const std::int64_t> like, std::int64_t last, Dtype dtype) {
  std::array<std::int64_t, Shape::kMaxRank> sizes;
  std::copy(like.begin(), like.end() - 1, sizes.begin());
  sizes[like.size() - 1] = last;
  return empty(std::span(sizes).first(like.size()), dtype);
}

std::int64_t leading(std::span<const std::int64_t> sizes) {
  std::int64_t m = 1;
  for (const std::int64_t size : sizes.first(sizes.size() - 1)) m *= size;
  return m;
}

Tensor linear_op(Tensor given, Tensor codes, std::vector<Tensor> scales, std::int64_t key,
                 std::int64_t rows, std::optional<Tensor> given_bias, bool exact) {
  constexpr const char* kWhere = "stowage::linear";
  const Tensor x = factor(kWhere, "x", given);
  const auto sizes = sizes_of(x);
  const Dtype dtype = dtype_of(x);
  check_columns(kWhere, "x", sizes, codes, 1, key);
  const Held held = hold(kWhere, codes, scales, key, Shape{rows, sizes.back()});
  const auto bias =
      given_bias ? std::optional(bias_of(kWhere, *given_bias, dtype, rows)) : std::nullopt;
  if (exact) return exact_linear(given, held.weight, bias, dtype);
  const Tensor y = result(sizes, rows, dtype);
  const Product product{x.const_data_ptr(),
                        leading(sizes),
                        dtype,
                        held.weight,
                        bias ? bias->const_data_ptr() : nullptr,
                        y.mutable_data_ptr()};
  if (product.m <= most_rows_of_own_kernel(held.weight, dtype)) {
    linear(product.x, product.m, dtype, product.weight, product.bias, product.y, &torch_executor());
  } else {
    tiled_linear(product);
  }
  return y;
}

Tensor linear_grad_input_op(Tensor given, Tensor codes, std::vector<Tensor> scales,
                            std::int64_t key, std::int64_t columns, bool exact) {
  constexpr const char* kWhere = "stowage::linear_grad_input";
  const Tensor g = factor(kWhere, "g", given);
  const auto sizes = sizes_of(g);
  const Dtype dtype = dtype_of(g);
  check_columns(kWhere, "g", sizes, codes, 0, key);
  const Held held = hold(kWhere, codes, scales, key, Shape{sizes.back(), columns});
  const Tensor gx = result(sizes, columns, dtype);
  const Product product{g.const_data_ptr(), leading(sizes), dtype,
                        held.weight,        nullptr,        gx.mutable_data_ptr()};
  if (exact) {
    exact_grad_input(product);
  } else if (product.m <= most_rows_of_own_kernel(held.weight, dtype)) {
    linear_grad_input(product.x, product.m, dtype, product.weight, product.y, &torch_executor());
  } else {
    tiled_grad_input(product);
  }
  return gx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CPU, m) {
  m.impl("linear", TORCH_BOX(&Door<&linear_op>::call));
  m.impl("linear_grad_input", TORCH_BOX(&Door<&linear_grad_input_op>::call));
}
}  // namespace stowage::door
