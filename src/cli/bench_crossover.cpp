// SPDX-License-Identifier: Apache-2.0
// `stowage bench --crossover`: which way to multiply is quicker here, for products.
#include "base/env.h"
#include "base/formatted.h"
#include "cli/bench.h"
#include "cli/text.h"
#include "kernel/crossover.h"
#include "stowage/info.h"
#include "stowage/plan.h"

namespace stowage::cli {
namespace {

std::string rows_text(std::int64_t rows) { return rows == kAnyRows ? "any" : std::to_string(rows); }

}  // namespace

void bench_crossover(const BenchOptions& options) {
  const Crossover before = crossover(), now = crossover_of_this_machine(true);
  if (options.json) return print(to_json(now));
  Table table({"way", "up to rows of x", "before"}, 1);
  for (const CrossoverField& field : kCrossoverFields)
    table.add({field.what, rows_text(now.*field.value), rows_text(before.*field.value)});
  print(
      formatted("{}, {}\n\n{}\nkept in {}; torch's are measured by stowage.crossover(anew=True)\n",
                machine_key(), instruction_set(), table.text(), env::links_path()));
}

}  // namespace stowage::cli
