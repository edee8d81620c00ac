// SPDX-License-Identifier: Apache-2.0
// One opened safetensors or GGUF file, and the set of them that a model is.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "store/header.h"
#include "store/manifest.h"
#include "stowage/file.h"

namespace stowage {

struct Shard {
  MappedFile map;
  Header header;
  Manifest manifest;  // empty where other tools wrote
};

inline namespace v0 {
/// The open files of a File, in the order of its paths, for as long as it lives.
struct OpenShards {
  static std::span<const Shard> of(const File& file) noexcept;
};
}  // namespace v0

Shard open_shard(const std::string& path);
/// The shards that the index at `path` names, in the order of their names, checked against it.
std::vector<Shard> open_shard_set(const std::string& path);

/// Throws bad_file if the open file has another size than when it was opened.
void check_size(const MappedFile& file);
/// Throws bad_file if the open file was written or cut short since it was opened, or if a page of
/// its mapping was lost. Not if it was renamed, replaced or deleted: what is open stays.
void check_unchanged(const MappedFile& file);

}  // namespace stowage
