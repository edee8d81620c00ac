// SPDX-License-Identifier: Apache-2.0
// What AVX-512 VBMI and VNNI do better together: products of dense codes.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/linear_bytes_dense-inl.h"
#include "kernel/cpu/linear_bytes_lines-inl.h"

namespace stowage {
extern const BytesKernels kAvx512DenseBytes;  // the one symbol of this file
constexpr BytesKernels kAvx512DenseBytes = with_lines(with_dense({}));
}  // namespace stowage
