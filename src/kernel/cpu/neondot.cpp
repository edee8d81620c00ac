// SPDX-License-Identifier: Apache-2.0
// What AArch64 does better that multiplies bytes (FEAT_DotProd): products in integers.
#include "kernel/cpu/neon-inl.h"

#include "kernel/cpu/linear_bytes_dense-inl.h"
#include "kernel/cpu/linear_bytes_table-inl.h"

namespace stowage {
extern const BytesKernels kNeonDotBytes;  // the one symbol of this file
constexpr BytesKernels kNeonDotBytes = with_dense(with_tables(all_bytes_kernels()));
}  // namespace stowage
