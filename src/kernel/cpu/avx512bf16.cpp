// SPDX-License-Identifier: Apache-2.0
// What AVX512-BF16 does better: products with bf16.
#include "kernel/cpu/linear_bf16-inl.h"
#include "kernel/cpu/linear_bf16_matrices-inl.h"
#include "kernel/cpu/linear_float8-inl.h"

namespace stowage {
extern const Bf16Kernels kAvx512Bf16Linear;  // the symbols of this file
extern const MatrixKernels kAvx512Bf16Matrices;
extern bool (*const kArePairsQuick)() noexcept;
constexpr Bf16Kernels kAvx512Bf16Linear = {&arrange_bf16,
                                           &dot_nf4,
                                           &dot_fp4,
                                           &dot_own,
                                           &dot_float8<Codes::f8_e4m3>,
                                           &dot_float8<Codes::f8_e5m2>,
                                           &add_pairs};
constexpr MatrixKernels kAvx512Bf16Matrices = {&begin_in_pairs, &end_in_pairs, &multiply_in_pairs,
                                               &pair_rows, &turn_sums};
bool (*const kArePairsQuick)() noexcept = &are_pairs_quick;
}  // namespace stowage
