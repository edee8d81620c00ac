// SPDX-License-Identifier: Apache-2.0
// Where everything will lie in the files of a writing, known before the first byte is written.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "store/manifest.h"
#include "stowage/writer.h"

namespace stowage {

/// Data of fewer bytes is not worth a page of padding ahead of it.
inline constexpr std::uint64_t kPagedData = 65536;
/// A cache line, and more than any element needs.
inline constexpr std::uint64_t kCacheLine = 64;

/// The data of a file, so many bytes of it, begins at a multiple of this.
constexpr std::uint64_t data_alignment(std::uint64_t data_bytes) noexcept {
  return data_bytes >= kPagedData ? kPage : kCacheLine;
}

struct PlannedTensor {
  Declaration declaration;
  std::uint64_t offset = 0, bytes = 0;  // offset from the start of the data
};
struct PlannedShard {
  std::string path;
  std::vector<PlannedTensor> tensors;  // in the order of their data
  Manifest manifest;                   // checksums all 0 until they are known
  std::uint64_t data_bytes = 0;
  bool ours = true;      // its header has the manifest
  std::string header{};  // of another tool, byte for byte; none: as header_text() makes it
};

/// Throws invalid_argument for what no file can hold or what contradicts itself.
std::vector<PlannedShard> plan_shards(const std::string& path, std::vector<Declaration> tensors,
                                      const WriterOptions& options);

/// The files that `like` describes, in the folder of `path`. Throws bad_file for bad headers.
std::vector<PlannedShard> plan_shards_like(const std::string& path,
                                           const std::vector<FileImage>& like);

/// The length field and the JSON, padded with spaces up to data_alignment(). The same length for
/// all values of the checksums and of the set id.
std::string header_text(const PlannedShard& shard,
                        const std::map<std::string, std::string>& metadata);

/// "a/model.safetensors" -> "a/model.safetensors.index.json".
std::string index_path(const std::string& path);

}  // namespace stowage
