// SPDX-License-Identifier: Apache-2.0
#include "cli/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"

namespace stowage::cli {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array<Unit, 9> kUnits{{{"", 1},
                                      {"B", 1},
                                      {"KB", 1000},
                                      {"MB", 1000000},
                                      {"GB", 1000000000},
                                      {"KiB", 1ull << 10},
                                      {"MiB", 1ull << 20},
                                      {"GiB", 1ull << 30},
                                      {"TiB", 1ull << 40}}};

constexpr std::array<std::pair<Dtype, std::string_view>, 4> kValueDtypes{
    {{Dtype::f64, "f64"}, {Dtype::f32, "f32"}, {Dtype::bf16, "bf16"}, {Dtype::f16, "f16"}}};

}  // namespace

std::string size_text(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kSteps{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return formatted("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t step = 0;
  for (; value >= 1024 && step + 1 < kSteps.size(); ++step) value /= 1024;
  return formatted("{:.2f} {}", value, kSteps[step]);
}

std::uint64_t parse_size(std::string_view text) {
  std::uint64_t count = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, count);
  std::string_view unit(stopped, static_cast<std::size_t>(end - stopped));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  const auto* const row = std::ranges::find(kUnits, unit, &Unit::name);
  if (error == std::errc{} && count > 0 && row != kUnits.end())
    if (const auto bytes = checked_mul(count, row->bytes)) return *bytes;
  throw Error(Code::invalid_argument,
              formatted("size: must be a number with B, KB, MB, GB, KiB, MiB, GiB or TiB, got "
                        "'{}'",
                        text));
}

std::string value_dtype_name(Dtype dtype) {
  const auto* const row = std::ranges::find(kValueDtypes, dtype, [](auto& r) { return r.first; });
  return row == kValueDtypes.end() ? std::string(disk_name(dtype)) : std::string(row->second);
}

std::optional<Dtype> value_dtype_from_name(std::string_view name) {
  const auto* const row = std::ranges::find(kValueDtypes, name, [](auto& r) { return r.second; });
  return row == kValueDtypes.end() ? std::nullopt : std::optional(row->first);
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

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw Error(Code::io, "stdout: must take what is printed, got an error");
}

}  // namespace stowage::cli
