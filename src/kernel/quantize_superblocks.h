// SPDX-License-Identifier: Apache-2.0
// Quantizing to superblocks of ggml, a part of quantize_with().
#pragma once
#include <cstdint>

#include "kernel/quantize_job.h"

namespace stowage {

/// For parts as layout() has them. At least kInfinityBits where a value or a scale is not finite;
/// then the parts hold no meaning.
std::uint32_t quantize_superblocks(const QuantizeJob& job, const Shape& shape);

}  // namespace stowage
