// SPDX-License-Identifier: Apache-2.0
// What a scale is that stands under one number, with others. `static` as in convert.h.
#pragma once
#include "format/convert.h"
#include "stowage/descriptor.h"

namespace stowage {

[[maybe_unused]] static inline float under_one(ScaleCode code, float scale, float outer) noexcept {
  if (code == ScaleCode::quotient) return scale / outer;
  if (code == ScaleCode::product_bf16)  // of at most 12 bits: rounded once
    return bf16_to_f32(f32_to_bf16(scale * bf16_to_f32(f32_to_bf16(outer))));
  return scale * outer;
}

}  // namespace stowage
