// SPDX-License-Identifier: Apache-2.0
// The numbers of a crossover by their names, for files, for STOWAGE_CROSSOVER and for tables; and
// how one is measured, for the ways of the core and for those that a host has beside them.
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <span>
#include <vector>

#include "kernel/stream.h"
#include "stowage/crossover.h"
#include "stowage/quantize.h"

namespace stowage {

struct CrossoverField {
  const char* name;
  std::int64_t Crossover::*value;
  std::int64_t most;  // that the way takes
  const char* what;
};
inline constexpr std::int64_t kAnyRows = std::int64_t{1} << 30;
inline constexpr std::int64_t kMostWidened = 64, kMostInIntegers = 16;  // rows of x
inline constexpr CrossoverField kCrossoverFields[]{
    {"rows", &Crossover::rows, kMostWidened, "rows of weight that are widened; more: tiles"},
    {"long_groups", &Crossover::long_groups, kMostInIntegers,
     "4-bit codes in integers, groups of 64 and more"},
    {"short_groups", &Crossover::short_groups, kMostInIntegers,
     "4-bit codes in integers, groups of 16 and 32"},
    {"bytes", &Crossover::bytes, kMostInIntegers,
     "codes of a byte in integers, groups of 16 and 32, and dense ones"},
    {"words", &Crossover::words, kMostInIntegers, "nf4 and fp4 in integers"},
    {"float8", &Crossover::float8, kMostInIntegers, "fp8 whose bits move to those of fp32"},
    {"vectors", &Crossover::vectors, kMostWidened, "bf16 before matrices of it multiply"},
    {"near", &Crossover::near, 1, "codes asked for into the L1 cache; more: the L2 cache"},
    {"own", &Crossover::own, kAnyRows, "kernels of ours before torch's, fp32 and f16"},
    {"own_bf16", &Crossover::own_bf16, kAnyRows, "kernels of ours before torch's, bf16"},
    {"own_matrices", &Crossover::own_matrices, kAnyRows,
     "the same, codes of up to 8 bits by matrices of it"},
    {"own_gradient", &Crossover::own_gradient, kAnyRows, "the same, gradients by them"}};

/// What this build has for the instruction set.
Crossover built_in_crossover();

/// A weight with values and rows of x, of numbers whose bits differ: some processors multiply zeros
/// faster than others.
class CrossoverProbe {
 public:
  static constexpr std::int64_t kLines = 768, kDepth = 2048;

  /// `dtype`: f32, bf16 or f16.
  CrossoverProbe(const char* storage, Dtype dtype, std::int64_t most)
      : storage_(parse_storage(storage)) {
    const Shape shape{kLines, kDepth};
    const Layout layout = stowage::layout(storage_, shape);
    std::vector<void*> parts;
    for (const Part& part : std::span(layout.parts).first(static_cast<std::size_t>(layout.count)))
      parts.push_back(parts_.emplace_back(static_cast<std::size_t>(part.bytes)).data());
    quantize_into(numbers(shape.elements(), 0.02f).data(), Dtype::f32, shape, storage_, parts);
    read_.assign(parts.begin(), parts.end());
    const std::vector<float> x = numbers(most * kDepth, 1.0f);
    const auto bytes = static_cast<std::size_t>(bits(dtype) / 8);
    x_.resize(x.size() * bytes);
    y_.resize(static_cast<std::size_t>(most * std::max(kLines, kDepth)) * bytes);
    const Storage plain{.codes = dtype == Dtype::f32    ? Codes::f32
                                 : dtype == Dtype::bf16 ? Codes::bf16
                                                        : Codes::f16};
    void* const to[] = {x_.data()};
    quantize_into(x.data(), Dtype::f32, {most * kDepth}, plain, to);
  }

  Weight weight() const { return {storage_, {kLines, kDepth}, read_}; }
  const void* x() const noexcept { return x_.data(); }
  void* y() noexcept { return y_.data(); }

  /// The most rows of those that are tried, in their order, up to which way(m) takes no longer than
  /// other(m): past two that do, nobody looks.
  template <class Way, class Other>
  static std::int64_t most_worth(std::span<const std::int64_t> tried, Way&& way, Other&& other) {
    constexpr int kRuns = 3;
    std::int64_t found = 0;
    int lost = 0;
    for (const std::int64_t m : tried) {
      double best[2] = {1e9, 1e9};
      for (int run = 0; run < kRuns; ++run) {
        best[0] = std::min(best[0], seconds([&] { way(m); }));
        best[1] = std::min(best[1], seconds([&] { other(m); }));
      }
      lost = best[0] <= best[1] ? 0 : lost + 1;
      if (lost == 0) found = m;
      if (lost == 2) break;
    }
    return found;
  }

  /// Whether way() takes less time than other(), each with the weight out of the caches; nothing
  /// where no program can put it there.
  template <class Way, class Other>
  std::optional<bool> is_quicker_from_memory(Way&& way, Other&& other) const {
    constexpr int kRuns = 15;
    std::array<double, kRuns> took[2];
    for (int run = 0; run < kRuns; ++run)
      for (int i = 0; i < 2; ++i) {
        for (const std::vector<std::byte>& part : parts_)
          if (!put_out_of_caches(part.data(), std::ssize(part))) return std::nullopt;
        took[i][run] = i == 0 ? seconds(way) : seconds(other);
      }
    for (auto& times : took) std::ranges::nth_element(times, times.begin() + kRuns / 2);
    return took[0][kRuns / 2] < took[1][kRuns / 2];
  }

 private:
  template <class Body>
  static double seconds(Body&& body) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  // From -2 to 2 times the scale.
  static std::vector<float> numbers(std::int64_t n, float scale) {
    std::vector<float> made(static_cast<std::size_t>(n));
    std::uint32_t state = 1;
    for (float& number : made) {
      state = state * 1664525u + 1013904223u;
      number = scale * (static_cast<float>(state >> 8) * 0x1p-22f - 2.0f);
    }
    return made;
  }

  const Storage storage_;
  std::vector<std::vector<std::byte>> parts_;
  std::vector<const void*> read_;
  std::vector<std::byte> x_, y_;
};

}  // namespace stowage
