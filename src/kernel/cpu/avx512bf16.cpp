// SPDX-License-Identifier: Apache-2.0
// What AVX512-BF16 does better: products with bf16, and rounding to it in short groups.
#include "kernel/cpu/avx512-inl.h"
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/linear_bf16-inl.h"
#include "kernel/cpu/linear_bf16_matrices-inl.h"
#include "kernel/cpu/linear_eights-inl.h"
#include "kernel/cpu/linear_fours-inl.h"

namespace stowage {
namespace {
constexpr PairKernels pair_kernels() {
  PairKernels kernels{{},
                      {&arrange_fours, &dot_nf4, &dot_fp4, &dot_exact, &dot_float8<Codes::f8_e4m3>,
                       &dot_float8<Codes::f8_e5m2>, &dot_eights<Codes::f8_e4m3>,
                       &dot_eights<Codes::f8_e5m2>, &dot_eights<Codes::int8>, &add_pairs},
                      {&begin_in_pairs, &end_in_pairs, &multiply_in_pairs, &pair_rows, &turn_sums},
                      &are_pairs_quick};
  for_all_codes([&]<Codes kCodes>() {
    if constexpr (kCodes == Codes::int8 || kCodes == Codes::f8_e4m3 || is_four_bit(kCodes))
      kernels.to_bf16[static_cast<int>(kCodes)] = &dequantize<kCodes, Dtype::bf16>;
  });
  return kernels;
}
}  // namespace

extern const PairKernels kAvx512Bf16Pairs;  // the one symbol of this file
constexpr PairKernels kAvx512Bf16Pairs = pair_kernels();
}  // namespace stowage
