// SPDX-License-Identifier: Apache-2.0
// What AVX-VNNI does better without AVX-512: products in integers, four of bytes to a sum.
#include "kernel/cpu/avx2-inl.h"
#include "kernel/cpu/linear_bytes_whole-inl.h"
#include "kernel/cpu/linear_words-inl.h"

namespace stowage {
extern const BytesKernels kAvx2VnniBytes;  // the one symbol of this file
constexpr BytesKernels kAvx2VnniBytes = with_words(all_bytes_kernels());
}  // namespace stowage
