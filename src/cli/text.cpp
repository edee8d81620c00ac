// SPDX-License-Identifier: Apache-2.0
#include "cli/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"

namespace stowage::cli {
namespace {

struct SizeUnit {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array<SizeUnit, 9> kUnits{{{"", 1},
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

std::uint64_t parse_size(std::string_view text) {
  std::uint64_t count = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, count);
  std::string_view unit(stopped, static_cast<std::size_t>(end - stopped));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  const auto* const row = std::ranges::find(kUnits, unit, &SizeUnit::name);
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

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw Error(Code::io, path + ": must be readable, is not");
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) throw Error(Code::io, path + ": must be writable, is not");
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw Error(Code::io, "stdout: must take what is printed, got an error");
}

}  // namespace stowage::cli
