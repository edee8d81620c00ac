// SPDX-License-Identifier: Apache-2.0
// What AVX-512 VNNI does better: four products of bytes to a sum, in vectors of 256 bits.
#include "kernel/cpu/avx2-inl.h"
#include "kernel/cpu/linear_bytes_whole-inl.h"
#include "kernel/cpu/linear_integers-inl.h"

namespace stowage {
extern const BytesKernels kAvx512VnniBytes;  // the one symbol of this file
constexpr BytesKernels kAvx512VnniBytes = with_integers(with_words(all_bytes_kernels()));
}  // namespace stowage
