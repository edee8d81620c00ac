// SPDX-License-Identifier: Apache-2.0
// The kernels for any CPU: the portable vocabulary as it stands, four lanes wide, in whatever the
// compiler's baseline has.
namespace stowage {
namespace {
constexpr int kWidth = 4;
}  // namespace
}  // namespace stowage
#include "kernel/cpu/lanes-inl.h"
namespace stowage {
namespace {
using Lanes = PortableLanes;
}  // namespace
}  // namespace stowage
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/linear-inl.h"
#include "kernel/cpu/quantize-inl.h"
#include "kernel/cpu/scales-inl.h"
#include "kernel/kernels.h"

namespace stowage {
extern const Kernels kScalarKernels;  // the one symbol of this file
constexpr Kernels kScalarKernels{Isa::scalar, dequantize_kernels(), quantize_kernels(),
                                 linear_kernels(), scale_kernels()};
}  // namespace stowage
