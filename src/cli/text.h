// SPDX-License-Identifier: Apache-2.0
// How the program writes sizes, tables and tensors' names.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/storage.h"

namespace stowage::cli {

/// "512 B", "1.50 MiB".
std::string size_text(std::uint64_t bytes);
/// "64MiB", "5GB", "1000" -> bytes. Throws invalid_argument.
std::uint64_t parse_size(std::string_view text);

/// "bf16" <-> Dtype::bf16, for value dtypes only.
std::string value_dtype_name(Dtype dtype);
std::optional<Dtype> value_dtype_from_name(std::string_view name);

/// Left-aligned columns, the ones from `numbers` on right-aligned; the first row is the heading.
class Table {
 public:
  Table(std::vector<std::string> heading, std::size_t numbers);
  void add(std::vector<std::string> row);
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::size_t numbers_;
};

/// Control characters of names from a file as \xNN, so that a terminal shows them.
std::string printable(std::string_view text);

/// Writes to stdout. Throws io when it cannot be written.
void print(std::string_view text);

}  // namespace stowage::cli
