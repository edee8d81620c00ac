// SPDX-License-Identifier: Apache-2.0
// Runs the cases in turn, so that what disturbs the machine disturbs limits and kernels alike.
#include "cli/bench.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "base/threads.h"
#include "cli/bench_case.h"
#include "cli/text.h"
#include "stowage/info.h"
#include "stowage/plan.h"

namespace stowage::cli {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
constexpr int kFewestRuns = 7, kMostRuns = 25;

double seconds_of(const BenchCase& a_case) {
  const Clock::time_point begin = Clock::now();
  a_case.run();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, middle);
  return *middle;
}

/// The median time of each case.
std::vector<double> run_in_turn(const std::vector<BenchCase>& cases, Clock::duration time) {
  std::vector<std::vector<double>> times(cases.size());
  for (const BenchCase& a_case : cases) a_case.run();  // pages, pools and threads come to life
  const Clock::time_point end = Clock::now() + time;
  for (int run = 0; run < kMostRuns && (run < kFewestRuns || Clock::now() < end); ++run)
    for (std::size_t i = 0; i < cases.size(); ++i) times[i].push_back(seconds_of(cases[i]));
  std::vector<double> medians;
  medians.reserve(times.size());
  for (const auto& of_case : times) medians.push_back(median(of_case));
  return medians;
}

BenchSizes sizes_for(const BenchOptions& options) {
  const std::int64_t cache = std::max(0L, sysconf(_SC_LEVEL3_CACHE_SIZE));
  constexpr std::int64_t kMiB = 1 << 20;
  const std::int64_t pool = std::clamp(cache * 3 / 2, 256 * kMiB, 1024 * kMiB);
  if (options.quick) return {4096, 4096, 2048, std::min(pool, 256 * kMiB), 500, 4s};
  return {16384, 4096, 4096, pool, 4000, 40s};
}

struct Measured {
  std::vector<BenchCase> cases;
  std::vector<double> seconds;

  double rate(std::size_t i) const { return cases[i].work / seconds[i] / 1e9; }
  double limit(const BenchCase& of) const {
    for (std::size_t i = 0; i < cases.size(); ++i)  // limits come first
      if (cases[i].limit == of.limit && cases[i].threads == of.threads) return rate(i);
    return 0;
  }
  BenchRow row(std::size_t i) const {
    const BenchCase& of = cases[i];
    const double limited = limit(of);
    return {of.name, of.bytes,          seconds[i], rate(i),          to_string(of.limit),
            limited, rate(i) / limited, of.threads, instruction_set()};
  }
};

void add_cases(const BenchOptions& options, BenchMemory& memory, Executor& executor,
               std::vector<BenchCase>& cases) {
  for (BenchCase& limit : limit_cases(memory, executor)) cases.push_back(std::move(limit));
  for (const auto& make : {dequantize_cases, quantize_cases, linear_cases})
    for (BenchCase& a_case : make(memory, executor))
      if (a_case.name.find(options.only) != std::string::npos) cases.push_back(std::move(a_case));
}

}  // namespace

void add_bench_options(CLI::App& command, BenchOptions& options) {
  command.add_flag("--json", options.json, "Print a JSON list instead of a table");
  command.add_flag("--quick", options.quick, "Smaller matrices, a few seconds");
  command.add_option("--threads", options.threads, "Threads to measure beside one")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command.add_option("--only", options.only, "Only rows whose name holds this text");
  command.add_flag("--links", options.links, "Measure the rates that plans go by, and keep them");
  command.add_flag("--crossover", options.crossover,
                   "Measure from how many rows on other ways to multiply are quicker, and keep it");
  command
      .add_option("--schedule", options.schedule,
                  "How products would share so many threads, had the machine as many")
      ->check(CLI::Range(2, 1024));
  command.add_option("PATH", options.path,
                     "With --links: a model or folder on the disk to measure");
}

std::vector<BenchRow> measure_bench(const BenchOptions& options, const BenchSizes& sizes) {
  BenchMemory memory(sizes);
  std::vector<std::unique_ptr<Executor>> pools;
  Measured measured;
  for (int threads = 1; threads <= options.threads; threads += std::max(1, options.threads - 1)) {
    pools.push_back(make_pool(threads));
    add_cases(options, memory, *pools.back(), measured.cases);
  }
  measured.seconds = run_in_turn(measured.cases, sizes.time);
  std::vector<BenchRow> rows;
  for (std::size_t i = 0; i < measured.cases.size(); ++i) rows.push_back(measured.row(i));
  return rows;
}

void bench(const BenchOptions& options) {
  use_kept_crossover();
  if (options.links) return bench_links(options);
  if (options.crossover) return bench_crossover(options);
  if (options.schedule != 0) return bench_schedule(options);
  const std::vector<BenchRow> rows = measure_bench(options, sizes_for(options));
  if (options.json) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const BenchRow& row : rows)
      list.push_back({{"name", row.name},
                      {"bytes", row.bytes},
                      {"seconds", row.seconds},
                      {"gbps", row.gbps},
                      {"limit_name", row.limit_name},
                      {"limit_gbps", row.limit_gbps},
                      {"ratio", row.ratio},
                      {"threads", row.threads},
                      {"isa", row.isa}});
    return print(json_text(list));
  }
  Table table({"kernel", "limit", "threads", "ms", "GB/s", "limit GB/s", "ratio"}, 2);
  for (const BenchRow& row : rows)
    table.add({row.name, row.limit_name, std::to_string(row.threads),
               formatted("{:.3f}", row.seconds * 1e3), formatted("{:.2f}", row.gbps),
               formatted("{:.2f}", row.limit_gbps), formatted("{:.2f}", row.ratio)});
  print(formatted("{}, {}\n{}", instruction_set(), version(), table.text()));
}

}  // namespace stowage::cli
