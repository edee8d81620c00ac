// SPDX-License-Identifier: Apache-2.0
// What is known of tensors, in files or in memory, before it is told which weights they are.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "store/manifest.h"
#include "store/quant_config.h"
#include "stowage/file.h"

namespace stowage {

/// What the search needs of a file, or of tensors in memory that have the names of a file's: the
/// tensors, sorted by name, and a way to read a small one.
struct TensorSource {
  std::vector<std::string> paths;
  const std::vector<TensorInfo>& tensors;
  std::function<std::string(const TensorInfo&)> read;  // of at most kLongestText bytes
  bool in_memory = false;  // nothing has an offset, and who takes a scale widens it to f32 himself
  bool is_ours = false;    // has a manifest
  bool is_gguf = false;
  std::map<std::string, ManifestWeight> said{};  // by the manifests of all shards
  std::vector<const std::map<std::string, std::string>*> metadata{};  // of each shard
  const QuantConfig* config = nullptr;                                // beside the files, or none
};
inline constexpr std::uint64_t kLongestText = 65536;  // quant states have about 170 bytes

/// The tensor of that name in a list sorted by name, or null.
inline const TensorInfo* find_tensor(const std::vector<TensorInfo>& tensors,
                                     std::string_view name) {
  const auto at = std::ranges::lower_bound(tensors, name, {}, &TensorInfo::name);
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

}  // namespace stowage
