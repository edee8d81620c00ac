// SPDX-License-Identifier: Apache-2.0
// `stowage bench --links`: what this machine moves and multiplies, for plans. And `--crossover`:
// which way to multiply is quicker here, for products.
#include "base/env.h"
#include "base/formatted.h"
#include "cli/bench.h"
#include "cli/text.h"
#include "kernel/crossover.h"
#include "stowage/info.h"
#include "stowage/plan.h"

namespace stowage::cli {
namespace {

std::string gb(double rate) { return formatted("{:.2f}", rate / 1e9); }

std::string text_of(const Links& links) {
  Table rates({"link", "GB/s"}, 1);
  rates.add({"disk, past the page cache", gb(links.disk)});
  rates.add({"disk, out of the page cache", gb(links.cached)});
  rates.add({"memcpy", gb(links.memcpy)});
  for (const auto& [name, rate] : links.accelerators) rates.add({"ram to " + name, gb(rate.copy)});
  Table families({"linear", "GB/s at rest, 1 row", "GFLOP/s, 64 rows"}, 1);
  for (const auto& [name, rate] : links.linear)
    families.add({name, gb(rate.read), gb(rate.multiply)});
  return formatted("{}\n\n{}\n{}\nkept in {}\n", links.key, rates.text(), families.text(),
                   env::links_path());
}

constexpr std::pair<std::int64_t Crossover::*, const char*> kWays[] = {
    {&Crossover::rows, "rows of weight that are widened; more: tiles"},
    {&Crossover::long_groups, "4-bit codes in integers, groups of 64 and more"},
    {&Crossover::short_groups, "4-bit codes in integers, groups of 16 and 32"},
    {&Crossover::bytes, "codes of a byte in integers, groups of 16 and 32"},
    {&Crossover::words, "nf4 and fp4 in integers"},
    {&Crossover::own, "kernels of ours before torch's, fp32 and f16"},
    {&Crossover::own_bf16, "kernels of ours before torch's, bf16"},
    {&Crossover::own_pairs, "the same, by pairs of bf16"},
    {&Crossover::own_codes, "the same, nf4 and fp4 by pairs"}};

std::string rows_text(std::int64_t rows) { return rows == kAnyRows ? "any" : std::to_string(rows); }

}  // namespace

void bench_crossover(const BenchOptions& options) {
  const Crossover before = crossover(), now = crossover_of_this_machine(true);
  if (options.json) return print(to_json(now));
  Table table({"way", "up to rows of x", "before"}, 1);
  for (const auto& [way, what] : kWays)
    table.add({what, rows_text(now.*way), rows_text(before.*way)});
  print(
      formatted("{}, {}\n\n{}\nkept in {}; torch's are measured by stowage.crossover(anew=True)\n",
                machine_key(), instruction_set(), table.text(), env::links_path()));
}

void bench_links(const BenchOptions& options) {
  const Links links = links_of_this_machine(options.path, true);
  print(options.json ? to_json(links) : text_of(links));
}

}  // namespace stowage::cli
