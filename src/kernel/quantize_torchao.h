// SPDX-License-Identifier: Apache-2.0
// Quantizing to nf4:torchao, a part of quantize_with().
#pragma once
#include <cstdint>

#include "kernel/quantize_job.h"

namespace stowage {

/// For a storage that has its dtype, elements in whole scaler blocks, parts as layout() has them.
/// The largest |x| as bits, or at least kInfinityBits where a value is not finite; then the parts
/// hold no meaning.
std::uint32_t quantize_torchao(const QuantizeJob& job);

}  // namespace stowage
