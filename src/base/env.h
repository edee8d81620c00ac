// SPDX-License-Identifier: Apache-2.0
// The one reader of the environment. Every variable has a row in one table, which docs/env.md is
// checked against.
#pragma once
#include <cstddef>
#include <span>
#include <string>

namespace stowage::env {

enum class Variable : std::size_t { force_isa, threads, links, crossover };

struct Row {
  Variable variable;
  const char* name;     // "STOWAGE_THREADS"
  const char* values;   // what it may hold
  const char* meaning;  // one sentence
};
/// One row for each variable, in the order of Variable.
std::span<const Row> table() noexcept;

/// The text of a variable; empty when it is not set.
std::string text(Variable variable);

/// STOWAGE_FORCE_ISA as it stands; the kernel dispatch checks it against the CPU.
std::string force_isa();
/// STOWAGE_THREADS, or 0 when it is not set. Throws invalid_argument unless it is 1 to kMaxThreads.
int threads();
inline constexpr int kMaxThreads = 1024;
/// STOWAGE_CROSSOVER as it stands; the plan layer reads it.
std::string crossover();
/// What oneDNN, torch's library of products, is told to use at most, in small letters: its own
/// ONEDNN_MAX_CPU_ISA, or DNNL_MAX_CPU_ISA where that is empty.
std::string onednn_isa();
/// Where the rates of this machine are kept: STOWAGE_LINKS, or stowage/links.json in the folder for
/// caches ($XDG_CACHE_HOME, ~/.cache, or that for temporary files).
std::string links_path();

}  // namespace stowage::env
