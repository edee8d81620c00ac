// SPDX-License-Identifier: Apache-2.0
// What AVX-512 VBMI does better: 8-bit codes and scales through tables of bytes.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/scales_avx512-inl.h"

namespace stowage {
extern const DequantizeKernels kAvx512VbmiDequantize;  // the symbols of this file
extern const Expand kAvx512VbmiMapped;
constexpr DequantizeKernels kAvx512VbmiDequantize = dequantize_kernels();
constexpr Expand kAvx512VbmiMapped = &expand_mapped_by_bytes;
}  // namespace stowage
