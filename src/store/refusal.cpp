// SPDX-License-Identifier: Apache-2.0
// The table of refusals and the text of their errors.
#include "store/refusal.h"

#include <algorithm>
#include <array>

#include "base/formatted.h"
#include "stowage/error.h"

namespace stowage {
namespace {

struct Text {
  Refusal why;
  std::string_view name, text;
};
constexpr std::array<Text, kRefusalCount> kTexts{{
    {Refusal::too_short, "too_short", "a safetensors file must have at least 10 bytes"},
    {Refusal::header_too_long, "header_too_long", "the header must have at most 100000000 bytes"},
    {Refusal::header_beyond_file, "header_beyond_file", "the header must end inside the file"},
    {Refusal::header_start, "header_start", "the header must begin with '{'"},
    {Refusal::json_syntax, "json_syntax", "the text must be one JSON object"},
    {Refusal::json_utf8, "json_utf8", "the text must be valid UTF-8"},
    {Refusal::json_depth, "json_depth", "JSON must not be nested deeper than 16"},
    {Refusal::duplicate_key, "duplicate_key", "a key must appear once"},
    {Refusal::unknown_key, "unknown_key", "a key must be one that the format has"},
    {Refusal::missing_key, "missing_key", "no required key may be missing"},
    {Refusal::wrong_type, "wrong_type", "a value must have the type that the format asks for"},
    {Refusal::rank, "rank", "a tensor must have at most 8 dimensions"},
    {Refusal::shape_overflow, "shape_overflow", "the size of a tensor must fit 63 bits"},
    {Refusal::partial_byte, "partial_byte", "elements must fill whole bytes"},
    {Refusal::offset_pair, "offset_pair", "data_offsets must be [begin, end] with begin <= end"},
    {Refusal::byte_count, "byte_count", "data_offsets must span the bytes of shape and dtype"},
    {Refusal::beyond_file, "beyond_file", "data must end inside the file"},
    {Refusal::overlap, "overlap", "tensors must not overlap"},
    {Refusal::gap, "gap", "tensors must follow each other without a gap"},
    {Refusal::trailing_bytes, "trailing_bytes", "the file must end with its last tensor"},
    {Refusal::gguf_version, "gguf_version", "a GGUF file must be little-endian, of version 2 or 3"},
    {Refusal::gguf_frame, "gguf_frame", "lengths and counts must end inside the file"},
    {Refusal::gguf_type, "gguf_type", "a type must be one that GGUF has"},
    {Refusal::gguf_block, "gguf_block", "a row must fill the blocks of its type"},
    {Refusal::gguf_alignment, "gguf_alignment", "general.alignment must be a power of two to 2^20"},
    {Refusal::shard_name, "shard_name", "a shard must be named by a path inside the folder"},
    {Refusal::shard_missing, "shard_missing", "a shard that the index names must be there"},
    {Refusal::not_in_shard, "not_in_shard", "the shard must hold the tensor that the index names"},
    {Refusal::not_in_index, "not_in_index", "the index must name every tensor of its shards"},
    {Refusal::duplicate_tensor, "duplicate_tensor", "a tensor must be in one shard only"},
    {Refusal::mixed_shards, "mixed_shards", "shards and index must come from one writing"},
    {Refusal::folder_empty, "folder_empty", "the folder must hold a safetensors model"},
    {Refusal::index_missing, "index_missing", "a shard must have its index beside it"},
    {Refusal::folder_ambiguous, "folder_ambiguous", "the folder must hold one model"},
    {Refusal::manifest_version, "manifest_version", "the manifest version must be 1"},
    {Refusal::manifest_value, "manifest_value", "the manifest must hold legal values"},
    {Refusal::manifest_part, "manifest_part", "a tensor must be as the manifest or label says"},
    {Refusal::checksum, "checksum", "the bytes must match their XXH3 checksum"},
    {Refusal::size_changed, "size_changed", "the file must keep its size while it is open"},
    {Refusal::file_changed, "file_changed", "the file must not be written while it is open"},
    {Refusal::scale_shape, "scale_shape", "the shape of a scale must fit its weight"},
    {Refusal::scale_block, "scale_block", "one block size must follow from the scale's shape"},
    {Refusal::quant_state_count, "quant_state_count", "a weight must have one quant_state"},
    {Refusal::quant_state_value, "quant_state_value", "the quant_state must hold legal values"},
    {Refusal::quant_state_part, "quant_state_part", "a tensor must be as the quant_state says"},
    {Refusal::quant_map, "quant_map", "the quant_map must be the table of its quant_type"},
    {Refusal::dialect_unknown, "dialect_unknown", "a quant_method must be one that is read"},
    {Refusal::dialect_ambiguous, "dialect_ambiguous", "a file must be of one dialect"},
    {Refusal::dialect_config, "dialect_config", "a configuration must say what its dialect has"},
    {Refusal::dialect_part, "dialect_part", "a tensor must be as its dialect says"},
}};
static_assert(std::ranges::all_of(kTexts,
                                  [](const Text& r) {
                                    return &kTexts[static_cast<std::size_t>(r.why)] == &r;
                                  }),
              "a row sits at its own index");

}  // namespace

std::string_view name(Refusal why) noexcept { return kTexts[static_cast<std::size_t>(why)].name; }
std::string_view rule(Refusal why) noexcept { return kTexts[static_cast<std::size_t>(why)].text; }

void refuse(Refusal why, const Place& place, const std::string& got) {
  std::string text = place.path + ": ";
  if (!place.tensor.empty()) text += formatted("tensor {}: ", in_quotes(place.tensor));
  if (place.byte) text += formatted("byte {}: ", *place.byte);
  throw Error(Code::bad_file, formatted("{}{}, got {} [{}]", text, rule(why), got, name(why)));
}

std::string in_quotes(std::string_view name) {
  constexpr std::size_t kLongest = 160;
  std::string text = "'";
  for (const char c : name.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7f ? formatted("\\x{:02x}", byte) : std::string(1, c);
  }
  return text + (name.size() > kLongest ? "...'" : "'");
}

}  // namespace stowage
