// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels once, by what the CPU can run and what STOWAGE_FORCE_ISA asks for. This file
// is built with baseline flags; only a table that the CPU can run is ever called.
#include <algorithm>
#include <array>
#include <string>

#include "base/cpu.h"
#include "base/env.h"
#include "kernel/kernels.h"
#include "stowage/info.h"

namespace stowage {

extern const Kernels kScalarKernels;

namespace {
constexpr std::array<std::string_view, 6> kNames{"scalar", "neon",       "avx2",
                                                 "avx512", "avx512bf16", "amx"};  // as in Isa

std::string all_names() {
  std::string all(kNames[0]);
  for (std::size_t i = 1; i < kNames.size(); ++i) all.append(", ").append(kNames[i]);
  return all;
}
}  // namespace

std::string_view to_string(Isa isa) noexcept { return kNames[static_cast<std::size_t>(isa)]; }

std::vector<NamedKernels> every_kernels() {
  std::vector<NamedKernels> tables{{"scalar", &kScalarKernels}};
  add_kernels_of_cpu(tables);
  return tables;
}

std::vector<NamedKernels> runnable_kernels() {
  std::vector<NamedKernels> tables = every_kernels();
  std::erase_if(tables, [](const NamedKernels& table) { return table.kernels == nullptr; });
  return tables;
}

const Kernels& kernels_named(std::string_view forced) {
  const std::vector<NamedKernels> tables = runnable_kernels();
  if (forced.empty()) return *tables.back().kernels;
  const std::string where = "STOWAGE_FORCE_ISA=" + std::string(forced);
  if (forced == "composite")
    throw Error(Code::unsupported,
                where + ": must be " + all_names() +
                    " here; the composite path is made of torch ops and lives in the Python "
                    "package");
  for (auto table = tables.rbegin(); table != tables.rend(); ++table)
    if (forced == to_string(table->kernels->isa)) return *table->kernels;
  if (std::ranges::find(kNames, forced) != kNames.end())
    throw Error(Code::unsupported, where + ": must be a set that this CPU runs, the best is " +
                                       std::string(to_string(tables.back().kernels->isa)));
  throw Error(Code::invalid_argument, where + ": must be " + all_names() + ", composite");
}

const Kernels& best_kernels() {
  static const Kernels& chosen = kernels_named(env::force_isa());
  return chosen;
}

inline namespace v0 {
std::string instruction_set() { return std::string(to_string(best_kernels().isa)); }
bool onednn_uses_amx() {
  const std::string most = env::onednn_isa();  // what it does not know, it ignores
  const bool names_one = most.starts_with("sse") || most.starts_with("avx");
  return cpu_features().amx_bf16 && (!names_one || most.find("amx") != std::string::npos);
}
}  // namespace v0

}  // namespace stowage
