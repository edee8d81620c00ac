// SPDX-License-Identifier: Apache-2.0
// What AVX2 does in integers: products of 4-bit weights and a few rows.
#include "kernel/cpu/avx2-inl.h"
#include "kernel/cpu/linear_words-inl.h"

namespace stowage {
extern const BytesKernels kAvx2Bytes;  // the one symbol of this file
constexpr BytesKernels kAvx2Bytes = with_words(bytes_kernels());
}  // namespace stowage
