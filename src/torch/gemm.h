// SPDX-License-Identifier: Apache-2.0
// Products by torch's own GEMM (oneDNN, which uses what the CPU has) on dequantized weight. What is
// passed to torch is checked before: an error inside an inner op loses its text.
#pragma once
#include <optional>

#include "stowage/weight.h"
#include "torch/arguments.h"

namespace stowage::door {

/// y[m, N] = x[m, K] W^T + bias, or y[m, K] = x[m, N] W; W is [N, K], all memory dense.
struct Product {
  const void* x;
  std::int64_t m;
  Dtype dtype;
  const Weight& weight;
  const void* bias;
  void* y;
};

/// Whether our kernels beat dequantizing a tile for torch: of linear, and of its gradient, for
/// which there are fewer.
bool own_linear_is_faster(const Product& product);
bool own_grad_is_faster(const Product& product);

/// Tile by tile, at most 4 MiB of dequantized weight at a time.
void tiled_linear(const Product& product);
void tiled_grad_input(const Product& product);

/// The whole weight dequantized into scratch, then one aten::linear on the tensor as it was given:
/// bit-equal to the dense layer that holds the dequantized weight.
Owned exact_linear(AtenTensorHandle x, const Weight& weight, const std::optional<Tensor>& bias,
                   Dtype dtype);
void exact_grad_input(const Product& product);

}  // namespace stowage::door
