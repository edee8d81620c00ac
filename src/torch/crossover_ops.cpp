// SPDX-License-Identifier: Apache-2.0
// Which way to multiply is quicker on this machine: those of the core, and from how many rows on
// torch's product of dequantized tiles is quicker than any of them.
#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <vector>

#include "kernel/crossover.h"
#include "stowage/plan.h"
#include "stowage/quantize.h"
#include "torch/executor.h"
#include "torch/gemm.h"

namespace stowage::door {
namespace {

constexpr std::int64_t kLines = 768, kDepth = 2048, kMost = 512;
constexpr int kRuns = 2;

/// A weight and some rows of x; all zeros, which take no longer.
class Probe {
 public:
  Probe(const char* storage, Dtype dtype)
      : storage_(parse_storage(storage)),
        dtype_(dtype),
        x_(static_cast<std::size_t>(kMost * kDepth)),
        y_(static_cast<std::size_t>(kMost * kLines)) {
    const Layout layout = stowage::layout(storage_, {kLines, kDepth});
    for (const Part& part : std::span(layout.parts).first(static_cast<std::size_t>(layout.count)))
      parts_.emplace_back(static_cast<std::size_t>(part.bytes));
  }

  double seconds(std::int64_t m, bool own) {
    std::vector<const void*> parts;
    for (const auto& part : parts_) parts.push_back(part.data());
    const Weight weight(storage_, {kLines, kDepth}, parts);
    const auto begin = std::chrono::steady_clock::now();
    if (own)
      linear(x_.data(), m, dtype_, weight, nullptr, y_.data(), &torch_executor());
    else
      tiled_linear({x_.data(), m, dtype_, weight, nullptr, y_.data()});
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  const Storage storage_;
  const Dtype dtype_;
  std::vector<std::vector<std::byte>> parts_;
  std::vector<float> x_, y_;  // of at most 32 bits
};

// The most rows, of those that are tried, up to which kernels of ours are as quick.
std::int64_t most_own(const char* storage, Dtype dtype) {
  Probe probe(storage, dtype);
  std::int64_t found = 0;
  int lost = 0;
  for (const std::int64_t m : {16, 32, 48, 64, 128, 256, 512}) {
    if (lost == 2) break;
    std::array<double, 2> best{1e9, 1e9};
    for (int run = 0; run < kRuns; ++run)
      for (const bool own : {false, true})
        best[own ? 1 : 0] = std::min(best[own ? 1 : 0], probe.seconds(m, own));
    lost = best[1] <= best[0] ? 0 : lost + 1;
    if (lost == 0) found = m;
  }
  return found == kMost ? kAnyRows : found;
}

Tensor crossover_measure() {
  const Crossover before = crossover();
  Crossover made = measure_crossover();
  use_crossover(made);  // ours at their best
  made.own = most_own("f8_e4m3:row", Dtype::f32);
  made.own_bf16 = most_own("bf16", Dtype::bf16);
  if (before.own_pairs != 0) made.own_pairs = most_own("int8:row", Dtype::bf16);
  if (before.own_codes != 0) made.own_codes = most_own("nf4", Dtype::bf16);
  keep_crossover(made);
  return text_bytes(to_json(made));
}

Tensor crossover_now() { return text_bytes(to_json(crossover())); }

bool crossover_use_kept() { return use_kept_crossover(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("crossover_measure", TORCH_BOX(&Door<&crossover_measure>::call));
  m.impl("crossover_now", TORCH_BOX(&Door<&crossover_now>::call));
  m.impl("crossover_use_kept", TORCH_BOX(&Door<&crossover_use_kept>::call));
}
}  // namespace stowage::door
