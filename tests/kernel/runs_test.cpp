// SPDX-License-Identifier: Apache-2.0
// Runs cover what they are asked for, in order, with the scale that the reference gives.
#include "kernel/runs.h"

#include "samples.h"

namespace stowage::runs_test {
namespace {

using namespace stowage::samples;

STOWAGE_ON_EACH_ISA(Runs, CoverEveryElementOnceWithItsScale) {
  for (const std::string& name : every_storage()) {
    const Storage storage = parse_storage(name);
    if (storage.dialect != Dialect::standard) continue;
    if (storage.scaling.transposed) continue;  // its runs are those of lying()
    const bool packed = describe(storage).packing == Packing::low_first;
    const std::int64_t columns = packed ? 998 : 997, all = 21 * columns;
    const Shape shape = holds(storage, {3, 7, columns}) ? Shape{3, 7, columns} : Shape{21, columns};
    const Bytes values = as_type(numbers(Kind::normal, static_cast<std::size_t>(all)), Dtype::f32);
    const Parts parts = reference_parts(values, Dtype::f32, shape, storage);
    const Weight weight = parts.weight(storage, shape);
    const auto* codes = static_cast<const std::uint8_t*>(weight.part(0));
    const Runs runs(table.scales, weight);
    for (const auto& [begin, end] :
         {std::pair<std::int64_t, std::int64_t>{0, all}, {997, 20000}, {5, 5}}) {
      std::int64_t at = begin;
      runs.cover(begin, end, [&](const stowage::Run& run) {
        const std::int64_t bits = trait(storage.codes).bits;
        const auto skipped = static_cast<const std::uint8_t*>(run.codes) - codes;
        EXPECT_EQ(skipped * 8 / bits + run.first, at) << name;
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
