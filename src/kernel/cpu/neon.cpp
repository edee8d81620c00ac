// SPDX-License-Identifier: Apache-2.0
// The kernels for AArch64, all of which has NEON.
#include "kernel/cpu/neon-inl.h"

#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/linear-inl.h"
#include "kernel/cpu/quantize-inl.h"
#include "kernel/cpu/scales-inl.h"
#include "kernel/kernels.h"

namespace stowage {
extern const Kernels kNeonKernels;  // the one symbol of this file
constexpr Kernels kNeonKernels{Isa::neon, dequantize_kernels(), quantize_kernels(),
                               linear_kernels(), scale_kernels()};
}  // namespace stowage
