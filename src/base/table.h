// SPDX-License-Identifier: Apache-2.0
// How sizes, tables and tensors' names are written for people.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stowage {

/// "512 B", "1.50 MiB".
std::string size_text(std::uint64_t bytes);
/// "2.31 s", "14.2 ms", "80.1 us".
std::string time_text(double seconds);

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

}  // namespace stowage
