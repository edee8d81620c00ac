// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/linear-inl.h"
#include "kernel/cpu/quantize-inl.h"
#include "kernel/cpu/scales_avx512-inl.h"
#include "kernel/kernels.h"

namespace stowage {
extern const Kernels kAvx512Kernels;  // the one symbol of this file
constexpr Kernels kAvx512Kernels{Isa::avx512, dequantize_kernels(), quantize_kernels(),
                                 linear_kernels(), wide_scale_kernels()};
}  // namespace stowage
