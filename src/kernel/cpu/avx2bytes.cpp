// SPDX-License-Identifier: Apache-2.0
// What AVX2 does in integers, products of weights of few bits and a few rows; and those of fp8.
#include "kernel/cpu/avx2-inl.h"
#include "kernel/cpu/linear_float8_moved-inl.h"
#include "kernel/cpu/linear_integers-inl.h"

namespace stowage {
extern const BytesKernels kAvx2Bytes;  // the one symbol of this file
constexpr BytesKernels kAvx2Bytes = with_moved_float8(with_integers(with_words(bytes_kernels())));
}  // namespace stowage
