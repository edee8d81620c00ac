// SPDX-License-Identifier: Apache-2.0
// What AVX-512 VNNI does better: products in integers, four of bytes to a sum.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/linear_bytes_whole-inl.h"
#include "kernel/cpu/linear_words-inl.h"

namespace stowage {
extern const BytesKernels kAvx512VnniBytes;  // the one symbol of this file
constexpr BytesKernels kAvx512VnniBytes = with_words(all_bytes_kernels());
}  // namespace stowage
