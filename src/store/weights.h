// SPDX-License-Identifier: Apache-2.0
// The weights in a set of tensors: what quant states, manifests and labels say, and by the
// conventions of docs/formats.md what names, element types and shapes say. The one rule for files
// and for states in memory.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "store/manifest.h"
#include "stowage/file.h"

namespace stowage {

/// What the search needs of a file, or of tensors in memory that have the names of a file's: the
/// tensors, sorted by name, and a way to read a small one.
struct TensorSource {
  std::vector<std::string> paths;
  const std::vector<TensorInfo>& tensors;
  std::function<std::string(const TensorInfo&)> read;  // of at most kLongestText bytes
  bool in_memory;  // nothing has an offset, and who takes a scale widens it to f32 himself
};
inline constexpr std::uint64_t kLongestText = 65536;  // quant states have about 170 bytes

/// Throws bad_file where parts are missing or contradict each other.
FoundWeights find_weights(const TensorSource& source,
                          const std::map<std::string, ManifestWeight>& said);

/// The tensor of that name in a list sorted by name, or null.
const TensorInfo* find_tensor(const std::vector<TensorInfo>& tensors, std::string_view name);

}  // namespace stowage
