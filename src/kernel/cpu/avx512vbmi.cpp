// SPDX-License-Identifier: Apache-2.0
// What AVX-512 VBMI does better: 8-bit codes and scales through tables of bytes.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/scales_avx512-inl.h"
#include "kernel/kernels.h"

namespace stowage {
extern const ByteTableKernels kAvx512VbmiTables;  // the one symbol of this file
constexpr ByteTableKernels kAvx512VbmiTables = {dequantize_kernels(), &expand_mapped_by_bytes};
}  // namespace stowage
