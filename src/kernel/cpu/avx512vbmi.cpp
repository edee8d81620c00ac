// SPDX-License-Identifier: Apache-2.0
// What AVX-512 VBMI does better: 8-bit codes through tables of bytes.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
extern const DequantizeKernels kAvx512VbmiDequantize;  // the one symbol of this file
constexpr DequantizeKernels kAvx512VbmiDequantize = dequantize_kernels();
}  // namespace stowage
