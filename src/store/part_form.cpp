// SPDX-License-Identifier: Apache-2.0
#include "store/part_form.h"

#include <cstring>

#include "format/convert.h"

namespace stowage {
namespace {

float rounded(float x, Dtype compute) {
  if (compute == Dtype::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (compute == Dtype::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

}  // namespace

std::vector<std::byte> part_of_tensor(PartForm form, std::span<const std::byte> bytes,
                                      Dtype compute) {
  std::vector<std::byte> made(bytes.begin(), bytes.end());
  if (form != PartForm::rounded) return made;
  for (std::size_t at = 0; at + sizeof(float) <= made.size(); at += sizeof(float)) {
    float x = 0;  // at any address
    std::memcpy(&x, made.data() + at, sizeof x);
    x = rounded(x, compute);
    std::memcpy(made.data() + at, &x, sizeof x);
  }
  return made;
}

}  // namespace stowage
