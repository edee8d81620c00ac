// SPDX-License-Identifier: Apache-2.0
// Which way is quicker from how many rows on: the same product with a way and without it.
#include "kernel/crossover.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernel/drivers.h"
#include "kernel/kernels.h"
#include "stowage/quantize.h"

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
  return made;
}

Crossover built_in(const Kernels& kernels) {
  const LinearKernels& of = kernels.linear;
  Crossover made{of.most_rows, of.bytes.most_long, of.bytes.most_short, of.bytes.most_whole,
                 of.bytes.most_words};
  // Measured on Zen 3 and Zen 4. Without AVX-512, torch's products of bf16 are many times slower
  // than those of fp32, and these slower than ours.
  const bool has_512 = kernels.isa >= Isa::avx512, has_pairs = of.bf16.pairs != nullptr;
  made.own = has_512 ? 64 : kAnyRows;
  made.own_bf16 = has_512 ? 16 : kAnyRows;
  made.own_pairs = has_pairs ? 48 : 0;
  made.own_codes = has_pairs ? 128 : 0;
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

// --- measuring -----------------------------------------------------------------------------------

constexpr std::int64_t kLines = 768, kDepth = 2048;
constexpr int kRuns = 3;

class Probe {
 public:
  explicit Probe(const char* storage)
      : storage_(parse_storage(storage)), x_(static_cast<std::size_t>(kMostRows * kDepth)) {
    const Shape shape{kLines, kDepth};
    const Layout layout = stowage::layout(storage_, shape);
    std::vector<std::uint16_t> values(static_cast<std::size_t>(shape.elements()));
    for (std::size_t i = 0; i < values.size(); ++i)  // of either sign, around 2^-6
      values[i] = static_cast<std::uint16_t>(0x3C00 + i * 7919 % 256 + (i * 31 % 2 << 15));
    for (std::size_t i = 0; i < x_.size(); ++i)
      x_[i] = static_cast<std::uint16_t>(0x3F00 + i * 6101 % 256 + (i * 17 % 2 << 15));
    std::vector<void*> parts;
    for (const Part& part : std::span(layout.parts).first(static_cast<std::size_t>(layout.count)))
      parts.push_back(parts_.emplace_back(static_cast<std::size_t>(part.bytes)).data());
    quantize_into(values.data(), Dtype::bf16, shape, storage_, parts);
    weight_.emplace(storage_, shape, std::vector<const void*>(parts.begin(), parts.end()));
    y_.resize(static_cast<std::size_t>(kMostRows * kLines));
  }

  double seconds(const Kernels& kernels, std::int64_t m, Dtype dtype) {
    const auto begin = std::chrono::steady_clock::now();
    linear_with(kernels, x_.data(), m, dtype, *weight_, nullptr, y_.data(), inline_executor());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  const Storage storage_;
  std::vector<std::vector<std::byte>> parts_;
  std::vector<std::uint16_t> x_, y_;  // of 16 bits
  std::optional<Weight> weight_;
};

// The most rows, of those that are tried, up to which a way is as quick: past two that are not,
// nobody looks.
std::int64_t most_worth(const char* storage, Dtype dtype, const Kernels& kernels, Crossover now,
                        std::int64_t Crossover::*way, std::int64_t most) {
  Probe probe(storage);
  Crossover without = now;
  now.*way = most;
  without.*way = 0;
  const Kernels tables[]{with(kernels, now), with(kernels, without)};
  std::int64_t found = 0;
  int lost = 0;
  for (const std::int64_t m : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
    if (m > most || lost == 2) break;
    std::array<double, 2> best{1e9, 1e9};
    for (int run = 0; run < kRuns; ++run)
      for (std::size_t i = 0; i < 2; ++i)
        best[i] = std::min(best[i], probe.seconds(tables[i], m, dtype));
    lost = best[0] <= best[1] ? 0 : lost + 1;
    if (lost == 0) found = m;
  }
  return found;
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
    const auto in_integers = [&](const char* storage, std::int64_t Crossover::*way) {
      made.*way = most_worth(storage, Dtype::bf16, best, made, way, kMostBytesRows);
    };
    in_integers("int4:block64:bf16", &Crossover::long_groups);
    in_integers("int4:block32:bf16", &Crossover::short_groups);
    in_integers("nf4", &Crossover::words);
    if (best.linear.bytes.dot[static_cast<std::size_t>(Codes::int8)] != nullptr)
      in_integers("int8:block32:f16", &Crossover::bytes);
  }
  // In f16, which nothing but these two ways multiplies; tiles take all that the other does.
  made.rows = std::max<std::int64_t>(
      1, most_worth("f8_e4m3:row", Dtype::f16, best, made, &Crossover::rows, kMostRows));
  return made;
}

}  // namespace v0
}  // namespace stowage
