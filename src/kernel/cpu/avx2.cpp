// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX2 with F16C and FMA.
#include "kernel/cpu/avx2-inl.h"
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/linear-inl.h"
#include "kernel/cpu/quantize-inl.h"
#include "kernel/cpu/scales-inl.h"
#include "kernel/kernels.h"

namespace stowage {
extern const Kernels kAvx2Kernels;  // the one symbol of this file
constexpr Kernels kAvx2Kernels{Isa::avx2, dequantize_kernels(), quantize_kernels(),
                               linear_kernels(), scale_kernels()};
}  // namespace stowage
