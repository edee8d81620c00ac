// SPDX-License-Identifier: Apache-2.0
// One opened safetensors file, and the set of them that a model is.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "store/header.h"
#include "store/manifest.h"

namespace stowage {

struct Shard {
  MappedFile map;
  Header header;
  Manifest manifest;  // empty where other tools wrote
};

Shard open_shard(const std::string& path);
/// The shards that the index at `path` names, in the order of their names, checked against it.
std::vector<Shard> open_shard_set(const std::string& path);

}  // namespace stowage
