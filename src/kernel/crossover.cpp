// SPDX-License-Identifier: Apache-2.0
// Which way is quicker from how many rows on: the same product with a way and without it.
#include "kernel/crossover.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "base/cpu.h"
#include "kernel/drivers.h"
#include "kernel/kernels.h"

namespace stowage {
namespace {

static_assert(kMostWidened == kMostRows && kMostInIntegers == kMostBytesRows);

// A table with another crossover; what of it is the torch ops' is not in a table.
Kernels with(const Kernels& kernels, const Crossover& crossover) {
  Kernels made = kernels;
  made.linear.most_rows = crossover.rows;
  made.linear.bytes.most_long = crossover.long_groups;
  made.linear.bytes.most_short = crossover.short_groups;
  made.linear.bytes.most_whole = crossover.bytes;
  made.linear.bytes.most_words = crossover.words;
  made.linear.bytes.most_float8 = crossover.float8;
  made.linear.matrices.most_by_vectors = crossover.vectors;
  made.linear.near = crossover.near != 0;
  return made;
}

Crossover built_in(const Kernels& kernels) {
  const LinearKernels& of = kernels.linear;
  Crossover made{
      of.most_rows,        of.bytes.most_long,   of.bytes.most_short,         of.bytes.most_whole,
      of.bytes.most_words, of.bytes.most_float8, of.matrices.most_by_vectors, of.near ? 1 : 0};
  // Measured on Zen 3, 4 and 5 and a Xeon with AMX. Without AVX-512, torch's products of bf16 are
  // many times slower than those of fp32, and these slower than ours.
  const bool has_512 = kernels.isa >= Isa::avx512;
  made.own = has_512 ? 64 : kAnyRows;
  made.own_bf16 = has_512 ? 16 : kAnyRows;
  // In pairs of bf16, not in tiles, torch's products of more rows gain what decoding costs.
  const std::int64_t most = kernels.isa == Isa::amx ? kAnyRows : 128;
  made.own_matrices = of.matrices.multiply != nullptr ? most : 0;
  const bool quicker = of.matrices.multiply != nullptr && !cpu_features().zen5;
  made.own_gradient = quicker ? kAnyRows : 0;
  return made;
}

// Those that were in force stay, since a product may still use one; they are found again.
struct Chosen {
  const Crossover crossover;
  const Kernels kernels;
  Chosen* before = nullptr;
};
struct EveryChosen {
  std::atomic<Chosen*> last;
  std::atomic<const Chosen*> now;
  explicit EveryChosen(Chosen* first) : last(first), now(first) {}
};
EveryChosen& chosen() {
  static EveryChosen every(new Chosen{built_in(best_kernels()), best_kernels()});
  return every;
}

const Chosen* chosen_for(const Crossover& crossover) {
  EveryChosen& every = chosen();
  for (const Chosen* some = every.last; some != nullptr; some = some->before)
    if (some->crossover == crossover) return some;
  auto* const made = new Chosen{crossover, with(best_kernels(), crossover), every.last};
  while (!every.last.compare_exchange_weak(made->before, made)) {
  }
  return made;
}

std::int64_t most_worth(const char* storage, Dtype dtype, Crossover now,
                        std::int64_t Crossover::*way, std::int64_t most) {
  constexpr std::array<std::int64_t, 12> kTried{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  CrossoverProbe probe(storage, dtype, most);
  Crossover without = now;
  now.*way = most;
  without.*way = 0;
  const Kernels tables[]{with(best_kernels(), now), with(best_kernels(), without)};
  const auto by = [&](const Kernels& kernels) {
    return [&](std::int64_t m) {
      linear_with(kernels, probe.x(), m, dtype, probe.weight(), nullptr, probe.y(),
                  inline_executor());
    };
  };
  const auto end = std::ranges::upper_bound(kTried, most);
  return CrossoverProbe::most_worth({kTried.begin(), end}, by(tables[0]), by(tables[1]));
}

// Of weights in memory, as they are where that tells.
bool near_is_worth_it(Crossover now) {
  CrossoverProbe probe("int8:row", Dtype::bf16, 1);
  now.near = 1;
  const Kernels near = with(best_kernels(), now);
  now.near = 0;
  const Kernels far = with(best_kernels(), now);
  const auto by = [&](const Kernels& kernels) {
    return [&] {
      linear_with(kernels, probe.x(), 1, Dtype::bf16, probe.weight(), nullptr, probe.y(),
                  inline_executor());
    };
  };
  return probe.is_quicker_from_memory(by(near), by(far)).value_or(best_kernels().linear.near);
}

}  // namespace

Crossover built_in_crossover() { return built_in(best_kernels()); }

const Kernels& kernels() { return chosen().now.load(std::memory_order_acquire)->kernels; }

inline namespace v0 {

Crossover crossover() { return chosen().now.load(std::memory_order_acquire)->crossover; }

void use_crossover(const Crossover& crossover) {
  for (const CrossoverField& field : kCrossoverFields)
    if (const std::int64_t got = crossover.*field.value; got < 0 || got > field.most)
      throw Error(Code::invalid_argument, std::string("crossover: ") + field.name +
                                              " must be from 0 to " + std::to_string(field.most) +
                                              ", got " + std::to_string(got));
  chosen().now.store(chosen_for(crossover), std::memory_order_release);
}

Crossover measure_crossover() {
  const Kernels& best = best_kernels();
  Crossover made = crossover();
  if (best.linear.bytes.dot[static_cast<std::size_t>(Codes::int4)] != nullptr) {
    const auto in_integers = [&](const char* storage, std::int64_t Crossover::*way,
                                 Dtype dtype = Dtype::bf16) {
      made.*way = most_worth(storage, dtype, made, way, kMostBytesRows);
    };
    // Where other ways have more rows of bf16, integers are for f16.
    const bool few = best.linear.bytes.most_bf16 < kMostBytesRows;
    const Dtype dtype = few ? Dtype::f16 : Dtype::bf16;
    in_integers("int4:block64:bf16", &Crossover::long_groups, dtype);
    in_integers("int4:block32:bf16", &Crossover::short_groups, dtype);
    in_integers("nf4", &Crossover::words, dtype);
    // Where subnormal factors are slow, numbers of a probe would not tell: few of them are.
    if (best.linear.bytes.most_float8 != 0) in_integers("f8_e4m3:row", &Crossover::float8);
    if (best.linear.bytes.dot[static_cast<std::size_t>(Codes::int8)] != nullptr)
      in_integers("int8:block32:f16", &Crossover::bytes);
  }
  if (best.linear.matrices.multiply != nullptr)
    made.vectors = most_worth("f8_e4m3:row", Dtype::bf16, made, &Crossover::vectors, kMostRows);
  if (best.isa >= Isa::avx512) made.near = near_is_worth_it(made) ? 1 : 0;  // others have one way
  // In f16, which nothing but these two ways multiplies then; tiles take all that the other does.
  Crossover two = made;
  two.float8 = 0;
  made.rows = std::max<std::int64_t>(
      1, most_worth("f8_e4m3:row", Dtype::f16, two, &Crossover::rows, kMostRows));
  return made;
}

}  // namespace v0
}  // namespace stowage
