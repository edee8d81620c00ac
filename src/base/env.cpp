// SPDX-License-Identifier: Apache-2.0
// The table of environment variables, and their checks.
#include "base/env.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>

#include "stowage/error.h"

namespace stowage::env {
namespace {

constexpr std::array<Row, 4> kTable{{
    {Variable::force_isa, "STOWAGE_FORCE_ISA",
     "scalar, neon, avx2, avx512, avx512bf16, amx, composite",
     "Use this instruction set instead of the best one of the CPU; `composite` (Python only) runs "
     "every op by stock torch ops."},
    {Variable::threads, "STOWAGE_THREADS", "1 to 1024",
     "Threads of the core's own pool; the CPUs this process may run on when it is not set. The "
     "torch ops use torch's threads instead."},
    {Variable::links, "STOWAGE_LINKS", "path of a file",
     "Where plans keep the measured rates of this machine, instead of stowage/links.json in "
     "$XDG_CACHE_HOME or ~/.cache."},
    {Variable::crossover, "STOWAGE_CROSSOVER", "built_in, or names and numbers: rows=8,words=3",
     "From how many rows of x on another way to multiply is taken, instead of what `stowage bench "
     "--crossover` measured and kept."},
}};

}  // namespace

std::span<const Row> table() noexcept { return kTable; }

std::string text(Variable variable) {
  const char* value = std::getenv(kTable[static_cast<std::size_t>(variable)].name);
  return value == nullptr ? std::string{} : std::string{value};
}

std::string force_isa() { return text(Variable::force_isa); }
std::string crossover() { return text(Variable::crossover); }

int threads() {
  const std::string value = text(Variable::threads);
  if (value.empty()) return 0;
  int count = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, error] = std::from_chars(value.data(), end, count);
  if (error != std::errc{} || stopped != end || count < 1 || count > kMaxThreads)
    throw Error(Code::invalid_argument, "STOWAGE_THREADS: must be a number from 1 to " +
                                            std::to_string(kMaxThreads) + ", got '" + value + "'");
  return count;
}

std::string onednn_isa() {
  std::string most;
  for (const char* const name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"})
    if (const char* const said = std::getenv(name); most.empty() && said != nullptr) most = said;
  std::ranges::transform(most, most.begin(), [](unsigned char letter) {
    return static_cast<char>(std::tolower(letter));
  });
  return most;
}

std::string links_path() {
  const std::string given = text(Variable::links);
  if (!given.empty()) return given;
  if (const char* const cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/')
    return std::string(cache) + "/stowage/links.json";
  if (const char* const home = std::getenv("HOME"); home != nullptr && *home == '/')
    return std::string(home) + "/.cache/stowage/links.json";
  return "/tmp/stowage-links.json";
}

}  // namespace stowage::env
