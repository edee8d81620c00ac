// SPDX-License-Identifier: Apache-2.0
#include "base/table.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/formatted.h"

namespace stowage {

std::string size_text(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kSteps{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return formatted("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t step = 0;
  for (; value >= 1024 && step + 1 < kSteps.size(); ++step) value /= 1024;
  return formatted("{:.2f} {}", value, kSteps[step]);
}

std::string time_text(double seconds) {
  if (seconds >= 1) return formatted("{:.2f} s", seconds);
  if (seconds >= 1e-3) return formatted("{:.2f} ms", seconds * 1e3);
  return formatted("{:.1f} us", seconds * 1e6);
}

Table::Table(std::vector<std::string> heading, std::size_t numbers) : numbers_(numbers) {
  add(std::move(heading));
}

void Table::add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_[0].size());
  for (const auto& row : rows_)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (c != 0) line += "  ";
      line += c < numbers_ ? formatted("{:<{}}", row[c], widths[c])
                           : formatted("{:>{}}", row[c], widths[c]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string printable(std::string_view text) {
  std::string shown;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    shown += code < 0x20 || code == 0x7f ? formatted("\\x{:02x}", code) : std::string(1, c);
  }
  return shown;
}

}  // namespace stowage
