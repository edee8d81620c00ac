// SPDX-License-Identifier: Apache-2.0
// Which way to multiply is quicker on this machine: those of the core, and from how many rows on
// torch's product of dequantized tiles is quicker than any of them.
#include <array>

#include "kernel/crossover.h"
#include "stowage/plan.h"
#include "torch/executor.h"
#include "torch/gemm.h"

namespace stowage::door {
namespace {

// Up to which rows of x kernels of ours are as quick as torch's: body(product) for each.
template <class Own, class Torch>
std::int64_t most_own(const char* storage, Dtype dtype, Own&& own, Torch&& by_torch) {
  constexpr std::array<std::int64_t, 7> kTried{16, 32, 48, 64, 128, 256, 512};
  CrossoverProbe probe(storage, dtype, kTried.back());
  const Weight weight = probe.weight();
  const auto product = [&](std::int64_t m) {
    return Product{probe.x(), m, dtype, weight, nullptr, probe.y()};
  };
  const std::int64_t found = CrossoverProbe::most_worth(
      kTried, [&](std::int64_t m) { own(product(m)); },
      [&](std::int64_t m) { by_torch(product(m)); });
  return found == kTried.back() ? kAnyRows : found;
}
std::int64_t most_own(const char* storage, Dtype dtype) {
  const auto own = [](const Product& p) {
    linear(p.x, p.m, p.dtype, p.weight, nullptr, p.y, &torch_executor());
  };
  return most_own(storage, dtype, own, &tiled_linear);
}
std::int64_t most_own_gradient(const char* storage, Dtype dtype) {
  const auto own = [](const Product& p) {
    linear_grad_input(p.x, p.m, p.dtype, p.weight, p.y, &torch_executor());
  };
  return most_own(storage, dtype, own, &tiled_grad_input);
}

Tensor crossover_measure() {
  const Crossover before = crossover();
  Crossover made = measure_crossover();
  use_crossover(made);  // ours at their best
  made.own = most_own("f8_e4m3:row", Dtype::f32);
  made.own_bf16 = most_own("bf16", Dtype::bf16);
  if (before.own_matrices != 0) made.own_matrices = most_own("int8:row", Dtype::bf16);
  if (before.own_gradient != 0) made.own_gradient = most_own_gradient("int8:row", Dtype::bf16);
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
