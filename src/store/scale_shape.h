// SPDX-License-Identifier: Apache-2.0
// Which scaling a scale's shape means, where nothing else tells.
#pragma once
#include "store/refusal.h"
#include "stowage/file.h"

namespace stowage {

/// The storage of 8-bit `codes` in `weight` with `scale`. Where two fit, the values they give are
/// the same and the simpler one is named. Throws bad_file: scale_shape where none fits, scale_block
/// where several block sizes do, or none that writers choose (a manifest or label would say which).
Storage storage_from_scale(Codes codes, const TensorInfo& weight, const TensorInfo& scale,
                           const Place& place);

}  // namespace stowage
