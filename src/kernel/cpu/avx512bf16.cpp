// SPDX-License-Identifier: Apache-2.0
// What AVX512-BF16 does better: products of 4-bit weights and bf16.
#include "kernel/cpu/linear_bf16-inl.h"

namespace stowage {
extern const Bf16Kernels kAvx512Bf16Linear;  // the one symbol of this file
constexpr Bf16Kernels kAvx512Bf16Linear = bf16_kernels();
}  // namespace stowage
