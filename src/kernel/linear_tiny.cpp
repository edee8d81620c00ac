// SPDX-License-Identifier: Apache-2.0
// The tiny path: weight and x are widened whole, on the stack, and multiplied as one tile.
#include "kernel/linear_paths.h"

namespace stowage {
namespace {

constexpr std::int64_t kFloats = 4096;  // of each buffer

}  // namespace

bool fits_tiny(const LinearCall& call) noexcept {
  const std::int64_t n = padded(call.weight->rows()), k = call.weight->columns();
  if (n > kFloats || k > kFloats || call.m > kFloats) return false;
  if (call.m == 1 && call.weight->has_dot()) return false;  // quicker by dot products
  return n * k <= kFloats && call.m * k <= kFloats && call.m * n <= kFloats;
}

void linear_tiny(const LinearCall& call) noexcept {
  const ExactFloats exact;
  const std::int64_t n = call.weight->rows(), k = call.weight->columns(), stride = padded(n);
  alignas(64) float x[kFloats], w[kFloats], columns[kFloats];
  call.widen_x(0, call.m * k, x);
  call.weight->widen(0, 0, n * k, w);
  if (n != stride) std::fill_n(columns, k * stride, 0.0f);
  call.kernels->transpose({w, k, n, k, columns, stride});
  float* sums = w;  // which is not needed any more
  call.kernels->tile({x, k, call.m, columns, stride, stride, k, sums, stride, false});
  call.finish(sums, stride, 0, call.m, 0, n, n);
}

}  // namespace stowage
