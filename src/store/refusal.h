// SPDX-License-Identifier: Apache-2.0
// Why a file is refused: one enumerator for each rule, one sentence for each enumerator, and the
// one function that turns them into a bad_file error. docs/errors.md lists them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace stowage {

enum class Refusal : std::uint8_t {
  // the frame of a safetensors file
  too_short,
  header_too_long,
  header_beyond_file,
  header_start,
  // any JSON text
  json_syntax,
  json_utf8,
  json_depth,
  duplicate_key,
  unknown_key,
  missing_key,
  wrong_type,
  // the tensors of a header
  rank,
  shape_overflow,
  partial_byte,
  offset_pair,
  byte_count,
  beyond_file,
  overlap,
  gap,
  trailing_bytes,
  // the frame of a GGUF file
  gguf_version,
  gguf_frame,
  gguf_type,
  gguf_block,
  gguf_alignment,
  // shard sets and folders
  shard_name,
  shard_missing,
  not_in_shard,
  not_in_index,
  duplicate_tensor,
  mixed_shards,
  folder_empty,
  index_missing,
  folder_ambiguous,
  // the manifest and the checksums
  manifest_version,
  manifest_value,
  manifest_part,
  checksum,
  size_changed,
  file_changed,
  // weights that are made of several tensors
  scale_shape,
  scale_block,
  quant_state_count,
  quant_state_value,
  quant_state_part,
  quant_map,
  // the dialect of a file
  dialect_unknown,
  dialect_ambiguous,
  dialect_config,
  dialect_part,
};
inline constexpr std::size_t kRefusalCount = static_cast<std::size_t>(Refusal::dialect_part) + 1;

/// The enumerator as docs/errors.md spells it, and what must hold.
std::string_view name(Refusal why) noexcept;
std::string_view rule(Refusal why) noexcept;

/// Where in a file: the byte counts from the start of the file at `path`.
struct Place {
  std::string path;
  std::string tensor;  // or empty
  std::optional<std::uint64_t> byte;
};
/// Throws bad_file "<path>: tensor '<tensor>': byte <byte>: <rule>, got <got> [<name>]".
[[noreturn]] void refuse(Refusal why, const Place& place, const std::string& got);

/// A name from a file, fit for a message: in quotes, control characters escaped, long ones cut.
std::string in_quotes(std::string_view name);

}  // namespace stowage
