// SPDX-License-Identifier: Apache-2.0
// What a model's config.json says of weights that rest, for libraries that do not read manifests.
#pragma once
#include <span>
#include <string>

#include "stowage/file.h"

namespace stowage {
inline namespace v0 {

/// The JSON object to stand under "quantization_config", in the form of compressed-tensors, whose
/// readers then dequantize what they find. Where that form cannot say a storage, it has a format
/// that they refuse: "stowage". "" where every weight is a plain cast, which needs nothing said.
/// Only name, storage and shape of the weights count.
STOWAGE_API std::string quantization_config(std::span<const WeightInfo> weights);

}  // namespace v0
}  // namespace stowage
