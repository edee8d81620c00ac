// SPDX-License-Identifier: Apache-2.0
// The header of a GGUF file, versions 2 and 3: what it says, checked against the file's size and
// itself. All numbers are little-endian.
//
//   "GGUF" | version u32 | tensors u64 | keys u64 | keys | tensors | zeros | data
//   key     text | type u32 | value             text   bytes u64 | UTF-8
//   array   type u32 | count u64 | values       tensor text | rank u32 | sizes u64, that of a row
//   the data and each tensor in it begin at          | first | type u32 | offset u64 in the data
//   multiples of general.alignment (32)
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "store/header.h"

namespace stowage {

inline constexpr std::string_view kGgufMagic = "GGUF";

/// Of the first bytes of a file.
bool is_gguf(std::span<const std::byte> bytes) noexcept;
/// Reads the header that stands at the start of `bytes`; the file at `path` has `file_bytes`.
/// Numbers and texts become metadata, arrays do not; a tensor of blocks has the name of its type
/// and no dtype. Throws bad_file.
Header parse_gguf(const std::string& path, std::span<const std::byte> bytes,
                  std::uint64_t file_bytes);

}  // namespace stowage
