// SPDX-License-Identifier: Apache-2.0
// What AMX does better: products of matrices of bf16.
#include "kernel/cpu/linear_amx-inl.h"

namespace stowage {
extern const MatrixKernels kAmxMatrices;  // the one symbol of this file
constexpr MatrixKernels kAmxMatrices = {&begin_matrices, &end_matrices, &multiply_matrices,
                                        &pair_rows, &turn_sums};
}  // namespace stowage
