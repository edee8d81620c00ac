// SPDX-License-Identifier: Apache-2.0
// `stowage doctor`: what this machine and its settings let Stowage have, and what each that is not
// as it could be costs.
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/env.h"
#include "base/formatted.h"
#include "base/host.h"
#include "base/table.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/items.h"
#include "cli/text.h"
#include "kernel/kernels.h"
#include "stowage/file.h"
#include "stowage/info.h"

namespace stowage::cli {
namespace {

namespace fs = std::filesystem;

struct Check {
  std::string name, found;
  std::string costs;  // "": it is as it should be
};

std::string best_instruction_set() { return std::string(to_string(kernels_named("").isa)); }

Check check_build() { return {"version", formatted("{} (commit {})", version(), commit()), ""}; }

Check check_cpu() {
  const std::string best = best_instruction_set(), cpu = host::cpu_name();
  Check made{"cpu", cpu.empty() ? best : cpu + ", " + best, ""};
  try {
    const std::string used = instruction_set();
    if (used != best) {
      made.found += ", forced to " + used;
      made.costs = "kernels run slower than they could; unset STOWAGE_FORCE_ISA";
    } else if (best == "scalar") {
      made.costs = "products take several times as long as on a CPU with AVX2";
    }
  } catch (const Error& error) {
    made.costs = formatted("nothing runs: {}", error.what());
  }
  return made;
}

Check check_threads() {
  const int cpus = available_cpus();
  const double limit = host::processor_limit();
  Check made{"threads", "", ""};
  try {
    const int threads = thread_count();
    made.found = formatted("{} on {} CPUs", threads, cpus);
    if (limit > 0) made.found += formatted(", with the time of {:.3g}", limit);
    const int most = limit > 0 ? static_cast<int>(std::ceil(limit)) : cpus;
    if (threads > most)
      made.costs = formatted(
          "threads wait for each other; set STOWAGE_THREADS, and OMP_NUM_THREADS for torch, to {}",
          most);
  } catch (const Error& error) {
    made.costs = formatted("nothing runs: {}", error.what());
  }
  return made;
}

Check check_memory(const host::Memory& memory) {
  Check made{"memory",
             formatted("{} available of {}", size_text(memory.available), size_text(memory.all)),
             ""};
  if (memory.limit == 0 || memory.limit >= memory.all) return made;
  made.found += formatted(", limited to {}", size_text(memory.limit));
  made.costs =
      "a process that takes more than the limit is ended, whatever is free; keep ram= below it";
  return made;
}

Check check_pages() {
  const std::string pages = host::huge_pages();
  Check made{"huge pages", pages.empty() ? "unknown" : pages, ""};
  if (pages == "never")
    made.costs =
        "memory is touched in pages of 4 KiB, so that loads take longer; write madvise to "
        "/sys/kernel/mm/transparent_hugepage/enabled";
  return made;
}

Check check_locks() {
  const std::uint64_t bytes = host::lockable();
  if (bytes == std::numeric_limits<std::uint64_t>::max()) return {"locked memory", "no limit", ""};
  return {"locked memory", size_text(bytes) + " (for lock= and pin=)", ""};
}

Check check_rates() {
  const std::string path = env::links_path();
  std::error_code error;
  if (fs::exists(path, error)) return {"rates", path, ""};
  fs::path folder = fs::path(path).parent_path();
  while (!folder.empty() && !fs::exists(folder, error) && folder != folder.parent_path())
    folder = folder.parent_path();
  if (!host::is_writable(folder.string()))
    return {"rates", path + " cannot be written",
            "each plan measures the machine again; set STOWAGE_LINKS to a path that can"};
  return {"rates", path + " is not there yet",
          "the first plan measures the machine; stowage bench --links does it now"};
}

// Of the tests and of building.
constexpr std::array kOthers{"STOWAGE_FUZZ_CALLS", "STOWAGE_KILLS", "STOWAGE_PROGRAM_STEPS",
                             "STOWAGE_SCHEDULES", "STOWAGE_FACADE"};

Check check_environment() {
  std::string known, unknown;
  for (const std::string& name : host::variables("STOWAGE_")) {
    const auto is_it = [&](const char* other) { return name == other; };
    const bool read = std::ranges::any_of(env::table(), is_it, &env::Row::name) ||
                      std::ranges::any_of(kOthers, is_it);
    std::string& list = read ? known : unknown;
    list += (list.empty() ? "" : ", ") + name;
  }
  Check made{"environment", known.empty() ? "nothing set" : known, ""};
  if (!unknown.empty()) made.costs = formatted("{}: not read by anything; misspelt?", unknown);
  return made;
}

Check check_model(const std::string& path, const host::Memory& memory) {
  try {
    const File file = File::open(path);
    std::uint64_t bytes = 0;
    for (const TensorInfo& tensor : file.tensors()) bytes += tensor.bytes;
    Check made{
        "model",
        formatted("{}: {} in {} tensors, {} weights at rest{}", printable(path), size_text(bytes),
                  file.tensors().size(), file.weights().size(), dialect_text(file)),
        ""};
    const fs::path folder = fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path();
    if (!host::is_writable(folder.empty() ? "." : folder.string())) made.found += ", read-only";
    const bool limited = memory.limit != 0 && memory.limit < memory.available;
    if (bytes > (limited ? memory.limit : memory.available))
      made.costs = "it is larger than memory; load it with ram=, or ask stowage plan";
    return made;
  } catch (const Error& error) {
    return {"model", printable(path), error.what()};
  }
}

}  // namespace

void doctor(const DoctorOptions& options) {
  const host::Memory memory = host::memory();
  std::vector<Check> checks{check_build(), check_cpu(),   check_threads(), check_memory(memory),
                            check_pages(), check_locks(), check_rates(),   check_environment()};
  if (!options.model.empty()) checks.push_back(check_model(options.model, memory));
  if (options.json) {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const Check& each : checks)
      all.push_back({{"name", each.name},
                     {"found", each.found},
                     {"ok", each.costs.empty()},
                     {"costs", each.costs}});
    return print(json_text(all));
  }
  Table table({"", "what", "found"}, 3);
  for (const Check& each : checks)
    table.add({each.costs.empty() ? "ok" : "see", each.name, each.found});
  print(table.text());
  for (const Check& each : checks)
    if (!each.costs.empty()) print(formatted("\n{}: {}", each.name, each.costs));
  const bool fine = std::ranges::all_of(checks, [](const Check& c) { return c.costs.empty(); });
  print(fine ? "\neverything is as it should be\n" : "\n");
}

}  // namespace stowage::cli
