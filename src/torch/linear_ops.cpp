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
Argument factor(const char* where, const char* name, const Tensor& given) {
  Argument x(where, name, given);
  const Dtype dtype = x.dtype();
  if (dtype != Dtype::bf16 && dtype != Dtype::f32 && dtype != Dtype::f16) {
    fail(Code::invalid_argument, std::string(where) + ": " + name +
                                     " must be float32, bfloat16 or float16, got " +
                                     dtype_text(dtype));
  }
  if (x.sizes().empty()) {
    fail(Code::invalid_argument,
         std::string(where) + ": " + name + " must have at least 1 dimension, got 0");
  }
  return x;
}

// 8-bit and wider codes have the weight's shape, so a wrong x can be told from wrong codes.
void check_columns(const char* where, const char* name, std::span<const std::int64_t> sizes,
                   const Tensor& codes, std::int64_t dim, std::int64_t key) {
  if (trait(storage_from_key(key).codes).bits == 4) return;
  if (codes.dim() != 2) {
    fail(Code::invalid_argument,
         std::string(where) + ": codes must have 2 dimensions, got " + std::to_string(codes.dim()));
  }
  if (sizes.back() != codes.size(dim)) {
    fail(Code::invalid_argument, std::string(where) + ": " + name + " must be [..., " +
                                     std::to_string(codes.size(dim)) + "], got " +
                                     to_string(Shape(sizes)));
  }
}

Argument bias_of(const char* where, const Tensor& given, Dtype dtype, std::int64_t rows) {
  Argument bias(where, "bias", given);
  if (bias.dtype() != dtype) {
    fail(Code::invalid_argument, std::string(where) + ": bias must be " + dtype_text(dtype) +
                                     " like x, got " + dtype_text(bias.dtype()));
  }
  if (bias.sizes().size() != 1 || bias.sizes()[0] != rows) {
    fail(Code::invalid_argument, std::string(where) + ": bias must be [" + std::to_string(rows) +
                                     "], got " + to_string(Shape(bias.sizes())));
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

Tensor linear_op(const Tensor& given, const Tensor& codes, const std::vector<Tensor>& scales,
                 std::int64_t key, std::int64_t rows, const std::optional<Tensor>& given_bias,
                 bool exact) {
  constexpr const char* kWhere = "stowage::linear";
  const Argument x = factor(kWhere, "x", given);
  const auto sizes = x.sizes();
  check_columns(kWhere, "x", sizes, codes, 1, key);
  const Held held(kWhere, codes, scales, key, Shape{rows, sizes.back()});
  std::optional<Argument> bias;
  if (given_bias) bias = bias_of(kWhere, *given_bias, x.dtype(), rows);
  if (exact) return exact_linear(given, held.weight(), given_bias, x.dtype());
  const Tensor y = result(sizes, rows, x.dtype());
  const Product product{x.data(),
                        leading(sizes),
                        x.dtype(),
                        held.weight(),
                        bias ? bias->data() : nullptr,
                        y.mutable_data_ptr()};
  if (product.m <= most_rows_of_own_kernel(held.weight(), x.dtype())) {
    linear(product.x, product.m, product.dtype, product.weight, product.bias, product.y,
           &torch_executor());
  } else {
    tiled_linear(product);
  }
  return y;
}

Tensor linear_grad_input_op(const Tensor& given, const Tensor& codes,
                            const std::vector<Tensor>& scales, std::int64_t key,
                            std::int64_t columns, bool exact) {
  constexpr const char* kWhere = "stowage::linear_grad_input";
  const Argument g = factor(kWhere, "g", given);
  const auto sizes = g.sizes();
  check_columns(kWhere, "g", sizes, codes, 0, key);
  const Held held(kWhere, codes, scales, key, Shape{sizes.back(), columns});
  const Tensor gx = result(sizes, columns, g.dtype());
  const Product product{g.data(),      leading(sizes), g.dtype(),
                        held.weight(), nullptr,        gx.mutable_data_ptr()};
  if (exact) {
    exact_grad_input(product);
  } else if (product.m <= most_rows_of_own_kernel(held.weight(), g.dtype())) {
    linear_grad_input(product.x, product.m, product.dtype, product.weight, product.y,
                      &torch_executor());
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
