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
/// Prints the rows as a table, or as a JSON list of objects with the keys of BenchRow.
void bench(const BenchOptions& options);

}  // namespace stowage::cli
