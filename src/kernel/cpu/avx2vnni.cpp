// SPDX-License-Identifier: Apache-2.0
// What AVX-VNNI does better without AVX-512: four products of bytes to a sum.
#include "kernel/cpu/avx2-inl.h"
#include "kernel/cpu/linear_bytes_whole-inl.h"
#include "kernel/cpu/linear_float8_moved-inl.h"
#include "kernel/cpu/linear_integers-inl.h"

namespace stowage {
extern const BytesKernels kAvx2VnniBytes;  // the one symbol of this file
constexpr BytesKernels kAvx2VnniBytes =
    with_moved_float8(with_integers(with_words(all_bytes_kernels())));
}  // namespace stowage
