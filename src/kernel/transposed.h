// SPDX-License-Identifier: Apache-2.0
// Stacks of matrices that lie transposed: a weight [E, K, O] whose codes and scales are those of
// [E, O, K]. Kernels know runs in the order in which codes lie, so matrices are turned on the way.
#pragma once
#include <cstdint>

#include "kernel/kernels.h"
#include "stowage/executor.h"
#include "stowage/weight.h"

namespace stowage {

inline bool is_transposed(const Weight& weight) noexcept {
  return weight.storage().scaling.transposed;
}

/// The weight in the order in which it lies: [E, O, K]. It borrows the parts.
Weight lying(const Weight& weight);

/// out[c, r] = values[r, c], of elements of `width` bytes: 2, 4 or 8.
void transpose_matrix(const void* values, std::int64_t rows, std::int64_t columns,
                      std::int64_t width, void* out, Executor& executor);

/// Values of matrix `first` + i of such a weight, or `ids`[i] where they are given, for i < n.
void decode_transposed(const Kernels& kernels, const Weight& weight, const std::int64_t* ids,
                       std::int64_t first, std::int64_t n, void* out, Dtype dtype,
                       Executor& executor);

}  // namespace stowage
