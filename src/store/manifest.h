// SPDX-License-Identifier: Apache-2.0
// The manifest: facts that safetensors has no place for, as JSON under the metadata key "stowage"
// of each shard. It tells what the shard's weights are and what its tensors' bytes hash to:
//   {"version": 1, "set": "<hex>", "weights": {"w": {"storage": "nf4:block64", "shape": [8, 64],
//    "compute": "bf16"}}, "xxh3": {"w": "<hex>", "w.absmax": "<hex>"}}
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "store/refusal.h"
#include "stowage/storage.h"

namespace stowage {

inline constexpr std::string_view kManifestKey = "stowage";

struct ManifestWeight {
  Storage storage;
  Shape shape;
  std::optional<Dtype> compute;
};
struct Manifest {
  std::string set;  // the same in all shards of one writing, "" for a single file
  std::map<std::string, ManifestWeight> weights;
  std::map<std::string, std::uint64_t> checksums;  // XXH3-64 of each tensor
};

Manifest parse_manifest(const Place& place, std::string_view json);  // throws bad_file
/// The same text for the same content; its length does not depend on the checksums' values.
std::string manifest_text(const Manifest& manifest);

/// 16 lower-case hexadecimal digits, and back.
std::string hex(std::uint64_t value);
std::optional<std::uint64_t> from_hex(std::string_view text);
/// "bf16" <-> Dtype::bf16, for value dtypes only.
std::string compute_name(Dtype dtype);
std::optional<Dtype> compute_from_name(std::string_view name);

}  // namespace stowage
