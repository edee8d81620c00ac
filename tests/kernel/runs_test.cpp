// SPDX-License-Identifier: Apache-2.0
// Runs cover what they are asked for, in order, with the scale that the reference gives.
#include "kernel/runs.h"

#include "samples.h"

namespace stowage::runs_test {
namespace {

using namespace stowage::samples;

// What code i of a dense string stands for.
int code_at(const std::uint8_t* codes, std::int64_t bits, std::int64_t i) {
  int code = 0;
  for (std::int64_t bit = i * bits; bit < (i + 1) * bits; ++bit)
    code |= (codes[bit / 8] >> bit % 8 & 1) << (bit - i * bits);
  return code - (1 << (bits - 1));
}

STOWAGE_ON_EACH_ISA(Runs, CoverEveryElementOnceWithItsScale) {
  for (const std::string& name : every_storage()) {
    const Storage storage = parse_storage(name);
    if (storage.dialect != Dialect::standard) continue;
    if (storage.scaling.transposed) continue;  // its runs are those of lying()
    const int together = codes_together(describe(storage).packing);
    const bool whole_groups = storage.scaling.outer == Scaling::Kind::row2;
    const std::int64_t columns = runs_across_rows(storage) ? 997
                                 : whole_groups            ? 31 * storage.scaling.block
                                 : together == 8           ? 1000
                                                           : 996 + together,
                       all = 24 * columns, some = std::min<std::int64_t>(all, 20000);
    const Shape shape = holds(storage, {3, 8, columns}) ? Shape{3, 8, columns} : Shape{24, columns};
    const Bytes values = as_type(numbers(Kind::normal, static_cast<std::size_t>(all)), Dtype::f32);
    const Parts parts = reference_parts(values, Dtype::f32, shape, storage);
    const Weight weight = parts.weight(storage, shape);
    const auto* codes = static_cast<const std::uint8_t*>(weight.part(0));
    const Runs runs(table, weight);
    for (const auto& [begin, end] :
         {std::pair<std::int64_t, std::int64_t>{0, all}, {some / 20 - 3, some}, {5, 5}}) {
      std::int64_t at = begin;
      runs.cover(begin, end, [&](const stowage::Run& run) {
        const std::int64_t bits = trait(storage.codes).bits;
        if (runs.unpacks()) {
          const auto* const made = static_cast<const std::int8_t*>(run.codes) + run.first;
          for (std::int64_t i = 0; i < run.n; ++i)
            ASSERT_EQ(made[i], code_at(codes, bits, at + i)) << name << " at " << at + i;
        } else {
          const auto skipped = static_cast<const std::uint8_t*>(run.codes) - codes;
          EXPECT_EQ(skipped * 8 / bits + run.first, at) << name;
        }
        for (std::int64_t i = 0; i < run.n; i += 11) {
          const float scale =
              run.scales == nullptr ? 1.0f : run.scales[(run.first + i) / run.group];
          float zero = run.zeros == nullptr ? 0.0f : run.zeros[(run.first + i) / run.group];
          if (storage.scaling.zero > Zero::code) zero = run.offsets[(run.first + i) / run.group];
          if (storage.scaling.zero == Zero::sum) zero = -zero;
          EXPECT_EQ(run.rounds, storage.scaling.zero == Zero::rounded ? runs.form().scale.type
                                                                      : Dtype::unknown);
          ASSERT_EQ(zero, reference::zero_at(weight, at + i)) << name << " at " << at + i;
          ASSERT_EQ(scale, reference::scale_at(weight, at + i)) << name << " at " << at + i;
        }
        at += run.n;
      });
      EXPECT_EQ(at, end) << name;
    }
  }
}

}  // namespace
}  // namespace stowage::runs_test
