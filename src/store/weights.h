// SPDX-License-Identifier: Apache-2.0
// The weights in a set of tensors: what quant states, manifests, labels and the dialect of a file
// say, and by the conventions of docs/formats.md what names, element types and shapes say. The one
// rule for files and for states in memory.
#pragma once

#include "store/tensor_source.h"
#include "stowage/file.h"

namespace stowage {

/// Throws bad_file where parts are missing or contradict each other, where two dialects are shown
/// and where the configuration names one that is not known.
FoundWeights find_weights(const TensorSource& source);

}  // namespace stowage
