// SPDX-License-Identifier: Apache-2.0
// The same products of densely packed codes. Digits are codes as they lie.
#pragma once
#if defined(__aarch64__)
#include "kernel/cpu/digits_neon-inl.h"
#else
#include "kernel/cpu/digits_avx512-inl.h"
#endif

namespace stowage {
namespace {

template <Codes kCodes>
void dense_dot(const BytesDotTask& given) noexcept {
  using Reader = DenseReaderOf<kCodes>;
  BytesDotTask task = given;
  task.bits = bits_of(kCodes);
  if (task.run.zeros != nullptr) return whole_groups<Reader, Zero::code, 1, 1, true>(task);
  whole_groups<Reader, Zero::none, 2, kTogetherInBytes, true>(task);
}

/// Adds these to a table of the other products in integers; x is arranged as for codes of a byte.
constexpr BytesKernels with_dense(BytesKernels kernels) {
  for_every_codes([&]<Codes kCodes>() {
    if constexpr (is_dense(kCodes)) kernels.set(kCodes, &dense_dot<kCodes>, kForBytes);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage
