// SPDX-License-Identifier: Apache-2.0
// A resting weight as another storage that holds the same values.
#pragma once
#include "stowage/weight.h"

namespace stowage::cli {

/// `storage`: of storage_in_dialect(): wider scales, zero points that are all 0, or its own.
Weight restated(const Weight& weight, const Storage& storage);
/// With scales of f32 rounded to bf16, as ComfyUI rounds them before it multiplies.
Weight with_rounded_scales(const Weight& weight);

}  // namespace stowage::cli
