// SPDX-License-Identifier: Apache-2.0
// How the program reads sizes and names of dtypes, and how it prints.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/table.h"
#include "stowage/storage.h"

namespace stowage::cli {

/// "64MiB", "5GB", "1000" -> bytes. Throws invalid_argument.
std::uint64_t parse_size(std::string_view text);

/// "bf16" <-> Dtype::bf16, for value dtypes only.
std::string value_dtype_name(Dtype dtype);
std::optional<Dtype> value_dtype_from_name(std::string_view name);

/// The whole of a small file, and a file that holds just this. Throw io.
std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);

/// With an end of line; bytes of names that are no UTF-8 are replaced.
std::string json_text(const nlohmann::ordered_json& json);

/// Writes to stdout. Throws io when it cannot be written.
void print(std::string_view text);

}  // namespace stowage::cli
