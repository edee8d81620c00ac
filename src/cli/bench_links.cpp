// SPDX-License-Identifier: Apache-2.0
// `stowage bench --links`: what this machine moves and multiplies, for plans.
#include "base/env.h"
#include "base/formatted.h"
#include "cli/bench.h"
#include "cli/text.h"
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

}  // namespace

void bench_links(const BenchOptions& options) {
  const Links links = links_of_this_machine(options.path, true);
  print(options.json ? to_json(links) : text_of(links));
}

}  // namespace stowage::cli
