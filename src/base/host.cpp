// SPDX-License-Identifier: Apache-2.0
#include "base/host.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

namespace stowage::host {
namespace {

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;  // version 1 writes about that for none

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<std::uint64_t> number(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return value;
}

std::uint64_t kibibytes(const std::string& text, std::string_view key) {
  return number(value_of(text, key)).value_or(0) << 10;
}

// The folders of the control groups of a process, from its own to the root.
std::vector<std::string> groups() {
  const std::string all = text_of("/proc/self/cgroup");
  const std::size_t at = all.find("0::/");
  std::string path = at == std::string::npos ? "" : all.substr(at + 3, all.find('\n', at) - at - 3);
  std::vector<std::string> found;
  for (; !path.empty(); path.resize(path.rfind('/')))
    if (path != "/") found.push_back("/sys/fs/cgroup" + path);
  found.emplace_back("/sys/fs/cgroup");
  return found;
}

}  // namespace

std::uint64_t bytes_of_limit(std::string_view text) {
  const std::uint64_t bytes = number(text).value_or(0);
  return bytes >= kNoLimit ? 0 : bytes;
}

double processors_of_limit(std::string_view text) {
  const auto time = number(text);
  const std::size_t gap = text.find(' ');
  if (!time || gap == std::string_view::npos) return 0;
  const std::uint64_t period = number(text.substr(gap)).value_or(0);
  return period == 0 ? 0 : static_cast<double>(*time) / static_cast<double>(period);
}

std::string chosen(std::string_view text) {
  const std::size_t open = text.find('['), close = text.find(']');
  if (open == std::string_view::npos || close == std::string_view::npos || close < open) return "";
  return std::string(text.substr(open + 1, close - open - 1));
}

std::string value_of(std::string_view text, std::string_view key) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    const std::size_t colon = line.find(':');
    if (line.starts_with(key) && colon != std::string_view::npos) {
      const std::size_t first = line.find_first_not_of(" \t", colon + 1);
      return first == std::string_view::npos ? "" : std::string(line.substr(first));
    }
    at = end + 1;
  }
  return "";
}

Memory memory() {
  const std::string facts = text_of("/proc/meminfo");
  Memory found{kibibytes(facts, "MemTotal"), kibibytes(facts, "MemAvailable"), 0};
  const auto take = [&](const std::string& path) {
    const std::uint64_t limit = bytes_of_limit(text_of(path));
    if (limit != 0 && (found.limit == 0 || limit < found.limit)) found.limit = limit;
  };
  for (const std::string& group : groups()) take(group + "/memory.max");
  take("/sys/fs/cgroup/memory/memory.limit_in_bytes");  // version 1
  return found;
}

double processor_limit() {
  double least = 0;
  for (const std::string& group : groups()) {
    const double limit = processors_of_limit(text_of(group + "/cpu.max"));
    if (limit > 0 && (least == 0 || limit < least)) least = limit;
  }
  return least;
}

std::uint64_t lockable() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;
  return limit.rlim_cur == RLIM_INFINITY ? std::numeric_limits<std::uint64_t>::max()
                                         : std::uint64_t{limit.rlim_cur};
}

std::string huge_pages() { return chosen(text_of("/sys/kernel/mm/transparent_hugepage/enabled")); }

std::string cpu_name() { return value_of(text_of("/proc/cpuinfo"), "model name"); }

std::vector<std::string> variables(std::string_view prefix) {
  std::vector<std::string> found;
  for (char** each = environ; each != nullptr && *each != nullptr; ++each) {
    const std::string_view pair(*each);
    if (pair.starts_with(prefix)) found.emplace_back(pair.substr(0, pair.find('=')));
  }
  std::ranges::sort(found);
  return found;
}

bool is_writable(const std::string& folder) {
  std::error_code error;
  return std::filesystem::is_directory(folder, error) && access(folder.c_str(), W_OK) == 0;
}

}  // namespace stowage::host
