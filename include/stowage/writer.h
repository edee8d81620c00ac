// SPDX-License-Identifier: Apache-2.0
// Writing safetensors files that appear whole or not at all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/file.h"

namespace stowage {
inline namespace v0 {

/// What a file will hold, known before the first byte is written.
struct Declaration {
  std::string name;
  Dtype dtype;
  Shape shape;
  std::string dtype_name;   // only where dtype is unknown
  std::uint64_t bytes = 0;  // only where dtype is unknown
};
/// A file as another tool laid it out.
struct FileImage {
  std::string name;         // beside the first
  std::string header;       // as File::header() gives it
  std::uint64_t bytes = 0;  // of the whole file
};
struct WriterOptions {
  std::map<std::string, std::string> metadata;  // "format": "pt" is added, "stowage" replaced
  std::vector<WeightInfo> weights;              // recorded in the manifest; parts may be empty
  std::uint64_t shard_bytes = 0;                // 0: one file; else an index and shards
  bool checksums = true;                        // XXH3 of every tensor, in the manifest
  std::vector<FileImage> like{};                // these files again: nothing else of this counts
  std::string index{};                          // the text of the index beside `like`, or none
  bool manifest = true;  // false: files of a peer's dialect alone, without weights and checksums
};

/// Declares, checks and reserves the space, then takes tensors in any order, then publishes. Until
/// finish() returns only a temporary file exists; a Writer destroyed before that leaves nothing.
class STOWAGE_API Writer {
 public:
  /// `path` ends in .safetensors; with `like` no tensors are declared, those of the headers are
  /// written, at the places that these say. Throws io (no space, not writable), invalid_argument
  /// (duplicate or empty names).
  Writer(const std::string& path, std::vector<Declaration> tensors,
         const WriterOptions& options = {});
  Writer(Writer&&) noexcept;
  Writer& operator=(Writer&&) noexcept;
  ~Writer();

  /// Throws invalid_argument when the name is unknown, written twice, or the size is not the
  /// declared one.
  void write(std::string_view name, std::span<const std::byte> bytes);
  /// Writes every tensor of disk_layout(name, weight.storage(), weight.shape()). The quant state of
  /// a 4-bit weight says the compute dtype that WriterOptions::weights gives (bf16 if none).
  void write_weight(std::string_view name, const Weight& weight);
  /// Flushes to disk and renames; the index is renamed last. Throws invalid_argument naming a
  /// tensor that was never written.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The tensors that weight `name` becomes in a file, by the table in docs/formats.md: entry i holds
/// part i of layout(). 4-bit storages end with the JSON quant state (which in nested ones is the
/// entry of nested_offset, since the number lives in it) and the quant map. Throws as layout().
STOWAGE_API std::vector<Declaration> disk_layout(std::string_view name, const Storage& storage,
                                                 const Shape& shape);
/// The text of a label: a tensor "<name>.stowage" (U8) that says storage and shape beside tensors
/// of disk_layout() where no manifest does. Throws as layout().
STOWAGE_API std::string label(const Storage& storage, const Shape& shape);
/// Whether the tensors of disk_layout() do not say both by their own names, dtypes and shapes.
STOWAGE_API bool needs_label(const Storage& storage, const Shape& shape);
/// The JSON quant state of a 4-bit weight as bitsandbytes reads it, padded with spaces to the size
/// that disk_layout() declares. Throws invalid_argument for other storages or an infinite offset.
STOWAGE_API std::string quant_state(const Storage& storage, const Shape& shape, Dtype compute,
                                    float nested_offset = 0);

}  // namespace v0
}  // namespace stowage
