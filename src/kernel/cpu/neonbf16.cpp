// SPDX-License-Identifier: Apache-2.0
// What AArch64 does better that multiplies bf16 (FEAT_BF16): products of matrices.
#include "kernel/cpu/linear_bfmmla-inl.h"

namespace stowage {
extern const MatrixKernels kNeonMatrices;  // the one symbol of this file
constexpr MatrixKernels kNeonMatrices = {&begin_matrices, &end_matrices, &multiply_matrices,
                                         &pair_rows, &turn_sums};
}  // namespace stowage
