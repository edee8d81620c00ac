// SPDX-License-Identifier: Apache-2.0
// The index of a shard set, `model.safetensors.index.json`: which shard holds which tensor.
//   {"metadata": {"total_size": 123, ...}, "weight_map": {"tensor": "shard file", ...}}
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace stowage {

inline constexpr std::string_view kSetKey = "stowage_set";  // in the index's metadata

struct ShardIndex {
  std::map<std::string, std::string> shard_of;  // tensor -> path relative to the index's folder
  std::string set;                              // id of the writing; "" where others wrote
};

/// Throws bad_file; refuses shard names that are absolute or contain "..", "." or empty parts.
/// Links that lie in the folder are followed: who can make one there can also write the model.
ShardIndex parse_shard_index(const std::string& path, std::string_view json);
/// The JSON of an index, the same text for the same content.
std::string shard_index_text(const ShardIndex& index, std::uint64_t total_bytes);

}  // namespace stowage
