// SPDX-License-Identifier: Apache-2.0
// The weights in a set of tensors: what the manifests say, what quant states say, and by the
// conventions of docs/formats.md what names, element types and shapes say.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "store/manifest.h"
#include "stowage/file.h"

namespace stowage {

struct Weights {
  std::vector<WeightInfo> infos;                             // sorted by name
  std::map<std::string, float, std::less<>> nested_offsets;  // of the nested ones, by weight
};

/// What the search needs of the file: its tensors, sorted by name, and a way to read one.
struct TensorSource {
  const std::vector<std::string>& paths;
  const std::vector<TensorInfo>& tensors;
  std::function<std::string(const TensorInfo&)> read;
};

/// Throws bad_file where parts are missing or contradict each other.
Weights find_weights(const TensorSource& source, const std::map<std::string, ManifestWeight>& said);

/// The tensor of that name in a list sorted by name, or null.
const TensorInfo* find_tensor(const std::vector<TensorInfo>& tensors, std::string_view name);

}  // namespace stowage
