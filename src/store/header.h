// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: what it says, checked against the file's size and itself.
//
//   byte 0        8                8 + n                      8 + n + data
//        | n: u64 | JSON, n bytes  | tensors, back to back    |
//          little   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
//          endian   and "__metadata__": {"key": "text", ...}; offsets count from 8 + n
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/file.h"

namespace stowage {

inline constexpr std::uint64_t kHeaderPrefix = 8;
inline constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of safetensors itself
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct Header {
  std::map<std::string, std::string> metadata;
  std::vector<TensorInfo> tensors;  // in the order of their data; offsets count from the file start
  std::uint64_t data_start = 0;
  bool is_gguf = false;
};

/// Checks the length field. Throws bad_file.
std::uint64_t check_header_length(const std::string& path, std::uint64_t length,
                                  std::uint64_t file_bytes);
/// Reads the JSON of a file of `file_bytes` bytes at `path`. Throws bad_file.
Header parse_header(const std::string& path, std::string_view json, std::uint64_t file_bytes);

}  // namespace stowage
