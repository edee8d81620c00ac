// SPDX-License-Identifier: Apache-2.0
#include "store/part_form.h"

#include <cstdint>
#include <cstring>

#include "format/convert.h"

namespace stowage {
namespace {

template <class To, class From, class Convert>
std::vector<std::byte> converted(std::span<const std::byte> bytes, Convert convert) {
  std::vector<std::byte> made(bytes.size() / sizeof(From) * sizeof(To));
  for (std::size_t i = 0; i < bytes.size() / sizeof(From); ++i) {
    From from;  // at any address
    std::memcpy(&from, bytes.data() + i * sizeof from, sizeof from);
    const To to = convert(from);
    std::memcpy(made.data() + i * sizeof to, &to, sizeof to);
  }
  return made;
}

float rounded(float x, Dtype compute) {
  if (compute == Dtype::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (compute == Dtype::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

}  // namespace

std::vector<std::byte> part_of_tensor(PartForm form, Dtype dtype, std::span<const std::byte> bytes,
                                      Dtype compute) {
  switch (form) {
    case PartForm::whole:
      break;
    case PartForm::widened:
      return converted<float, std::uint16_t>(bytes,
                                             dtype == Dtype::bf16 ? bf16_to_f32 : f16_to_f32);
    case PartForm::rounded:
      return converted<float, float>(bytes, [=](float x) { return rounded(x, compute); });
  }
  return {bytes.begin(), bytes.end()};
}

}  // namespace stowage
