// SPDX-License-Identifier: Apache-2.0
// `stowage bench`: the kernels beside the limits of this machine, measured in turn in one process.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace stowage::cli {

struct BenchSizes;

struct BenchOptions {
  bool json = false;
  bool quick = false;      // smaller matrices: figures for a first look
  int threads = 2;         // measured beside one thread
  std::string only;        // rows whose name holds this; "" for all
  bool links = false;      // instead: what the machine moves, measured anew and kept for plans
  std::string path = ".";  // of which disk
  bool crossover = false;  // instead: from how many rows other ways are quicker, measured and kept
  int schedule = 0;        // instead: how products would share so many threads; 0: not asked for
};

/// One kernel on so many threads, beside the limit that it can at best reach.
struct BenchRow {
  std::string name;
  std::int64_t bytes;  // that one run moves, as the limit counts them
  double seconds;      // median of the runs
  double gbps;         // bytes / seconds / 1e9; of a limit in gflops, 1e9 operations per second
  std::string limit_name;
  double limit_gbps;
  double ratio;  // gbps / limit_gbps
  int threads;
  std::string isa;
};

void add_bench_options(CLI::App& command, BenchOptions& options);
std::vector<BenchRow> measure_bench(const BenchOptions& options, const BenchSizes& sizes);
/// Measures the rates that plans go by, keeps them and prints them.
void bench_links(const BenchOptions& options);
/// Measures from how many rows on other ways to multiply are quicker, keeps that and prints it.
void bench_crossover(const BenchOptions& options);
/// A product with a square weight on so many claimed threads.
struct ScheduleRow {
  std::string name;
  std::int64_t size;  // rows of the weight
  int threads;
  double processor, path;  // time over that of one thread; until the end, over an equal share of it
};
std::vector<ScheduleRow> measure_schedule(const BenchOptions& options, std::int64_t size);
/// Prints what products would take on threads that this machine need not have.
void bench_schedule(const BenchOptions& options);
/// Prints the rows as a table, or as a JSON list of objects with the keys of BenchRow.
void bench(const BenchOptions& options);

}  // namespace stowage::cli
