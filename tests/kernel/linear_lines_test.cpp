// SPDX-License-Identifier: Apache-2.0
// One row of x and scales that are read as they lie, sixteen at a time.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernel/fenced.h"
#include "kernel/fixed_point.h"
#include "kernel/linear_cases.h"

namespace stowage::linear_test {
namespace {

constexpr const char* kStorages[] = {
    "mxfp4", "nvfp4", "mxint8",           "int4:block32:f16",
    "q4_k",  "q6_k",  "int8:block32:f16", "int4:block128:f16:zero"};

Kernels without_lines(const Kernels& table) {
  Kernels other = table;
  other.linear.bytes.lines = {};
  return other;
}
Values run_one(const Kernels& table, const Values& x, const Weight& weight) {
  return run_linear(table, x, 1, weight, nullptr, inline_executor());
}
/// The weight with other scales, whose bytes `change` has changed.
template <class Change>
Weight with_scales(const Weight& weight, std::vector<std::vector<std::byte>>& room,
                   const Change& change) {
  const Layout form = layout(weight.storage(), weight.shape());
  std::vector<const void*> parts;
  room.clear();
  for (int i = 0; i < form.count; ++i) {
    const auto* from = static_cast<const std::byte*>(weight.part(i));
    room.emplace_back(from, from + form.parts[static_cast<std::size_t>(i)].bytes);
  }
  change(room);
  for (const auto& part : room) parts.push_back(part.data());
  return {weight.storage(), weight.shape(), parts};
}

// Rows that end in any part of a line, of a block of codes, and streams of one row and of none:
// what they are multiplied by is what expanding makes, bit for bit, wherever lines are asked for.
// Offsets are added in another order.
STOWAGE_ON_EACH_ISA(LinearLinesOn, RowsEndInAnyPartOfALine) {
  Kernels other_near = table;
  other_near.linear.near = !table.linear.near;
  const Kernels expanded = without_lines(table);
  for (const char* storage : kStorages)
    for (const std::int64_t k : {64, 128, 192, 256, 320, 512, 576, 1088, 2048, 2176, 2304, 2880})
      for (const std::int64_t n : {67, 130}) {
        if (!samples::holds(parse_storage(storage), {n, k})) continue;
        const Weight weight = make_weight(storage, {n, k}, Data::heavy);
        const Values x = make_values(k % 3 == 0 ? Dtype::f16 : Dtype::bf16, k, Data::normal, 11);
        const Values y = run_one(table, x, weight);
        EXPECT_EQ(run_one(other_near, x, weight).bytes, y.bytes) << storage << " " << k;
        EXPECT_EQ(run_linear(table, x, 1, weight, nullptr, *make_pool(5)).bytes, y.bytes)
            << storage << " " << k;
        expect_within_bound(y, exact(x, 1, weight, nullptr), k, storage,
                            lost_in_integers(table, x, 1, weight));
        const bool same = std::string(storage) != "q4_k";
        EXPECT_TRUE(!same || run_one(expanded, x, weight).bytes == y.bytes) << storage << " " << k;
      }
}

// Scales of the same types and numbers of columns that lie otherwise.
STOWAGE_ON_EACH_ISA(LinearLinesOn, BlocksOfRowsHaveNone) {
  const std::int64_t n = 66, k = 1024;
  for (const char* storage :
       {"f4_e2m1:block32x32:e8m0", "int8:block2x32:e8m0", "int8:block8x32:f16",
        "int4:block4x32:f16", "int4:block2x128:f16:zero", "f4_e2m1:block32"}) {
    const Weight weight = make_weight(storage, {n, k}, Data::heavy);  // scales far apart
    const Values x = make_values(Dtype::bf16, k, Data::normal, 11);
    const Values y = run_one(table, x, weight);
    EXPECT_EQ(run_one(without_lines(table), x, weight).bytes, y.bytes) << storage;
    expect_within_bound(y, exact(x, 1, weight, nullptr), k, storage,
                        lost_in_integers(table, x, 1, weight));
  }
}

// A scale that is no number makes its row what expanding does, and no other row; so do those that
// lines have not: exponents of the least power of two, numbers of e4m3 below zero, and all of them
// under a number far from 1.
STOWAGE_ON_EACH_ISA(LinearLinesOn, ScalesThatAreRare) {
  const std::int64_t n = 70, k = 1024, row = 41;
  struct Case {
    const char* storage;
    std::vector<int> bytes;  // of one scale
    bool nan;
  };
  const std::vector<Case> cases = {{"mxfp4", {0xFF}, true},
                                   {"mxfp4", {0}, false},
                                   {"mxint8", {0xFF}, true},
                                   {"mxint8", {0}, false},
                                   {"nvfp4", {0x7F}, true},
                                   {"nvfp4", {0xFF}, true},
                                   {"nvfp4", {0xB8}, false},
                                   {"nvfp4", {0x01}, false},
                                   {"nvfp4", {0x80}, false},
                                   {"int4:block32:f16", {0x00, 0x7C}, true},
                                   {"int4:block32:f16", {1, 0}, false},
                                   {"int8:block32:f16", {0x00, 0xFE}, true},
                                   {"int4:block128:f16:zero", {0x00, 0x7E}, true}};
  for (const Case& one : cases) {
    const Weight whole = make_weight(one.storage, {n, k}, Data::normal);
    const auto of_row =
        static_cast<std::int64_t>(layout(whole.storage(), whole.shape()).parts[1].bytes) / n;
    const auto size = static_cast<std::int64_t>(one.bytes.size());
    std::vector<std::vector<std::byte>> room;
    const Weight changed = with_scales(whole, room, [&](auto& parts) {
      for (std::int64_t at = one.nan ? of_row - size : 0; at < of_row; ++at)  // the last, or all
        parts[1][static_cast<std::size_t>(row * of_row + at)] =
            static_cast<std::byte>(one.bytes[static_cast<std::size_t>(at % size)]);
    });
    const Values x = make_values(Dtype::bf16, k, Data::normal, 3);
    const Values y = run_one(table, x, changed);
    EXPECT_EQ(std::isnan(y[row]), one.nan) << one.storage << " " << one.bytes[0];
    const Values expected = run_one(without_lines(table), x, changed);
    const bool negative = std::string(one.storage) == "nvfp4" && one.bytes[0] >= 0x80;
    if (one.nan || negative) {  // goes another way
      for (std::int64_t i = 0; i < n; ++i)
        EXPECT_EQ(std::isnan(y[i]), std::isnan(expected[i])) << i;
    } else {
      EXPECT_EQ(y.bytes, expected.bytes) << one.storage << " " << one.bytes[0];
    }
    if (!one.nan)
      expect_within_bound(y, exact(x, 1, changed, nullptr), k, one.storage,
                          lost_in_integers(table, x, 1, changed));
  }
}

// The last parts lie against memory that may not be touched.
STOWAGE_ON_EACH_ISA(LinearLinesOn, NothingBeyondAWeightIsRead) {
  const std::int64_t n = 67;
  for (const char* storage : kStorages)
    for (const std::int64_t k : {64, 320, 2304, 2880}) {
      if (!samples::holds(parse_storage(storage), {n, k})) continue;
      const Weight plain = make_weight(storage, {n, k}, Data::normal);
      const Layout form = layout(plain.storage(), plain.shape());
      std::vector<std::unique_ptr<samples::Fenced>> memory;
      std::vector<const void*> parts;
      for (int i = 0; i < form.count; ++i) {
        const auto bytes = static_cast<std::size_t>(form.parts[static_cast<std::size_t>(i)].bytes);
        memory.push_back(std::make_unique<samples::Fenced>(bytes));
        const std::span whole(static_cast<const std::byte*>(plain.part(i)), bytes);
        parts.push_back(memory.back()->piece(whole, samples::Fenced::Against::end));
      }
      const Values x = make_values(Dtype::bf16, k, Data::normal, 3);
      const Weight fenced(plain.storage(), plain.shape(), parts);
      EXPECT_EQ(run_one(table, x, fenced).bytes, run_one(table, x, plain).bytes) << storage;
    }
}

// What asks which ways a weight has reads none of it.
STOWAGE_ON_EACH_ISA(LinearLinesOn, AWeightIsNotReadBeforeItIsUsed) {
  for (const char* storage : kStorages) {
    const samples::Fenced fence(64);
    const void* const at = fence.piece(0, samples::Fenced::Against::end);  // may not be touched
    const void* const nowhere[] = {at, at, at};
    const Storage form = parse_storage(storage);
    const auto count = static_cast<std::size_t>(layout(form, {4, 2304}).count);
    const Weight weight(form, {4, 2304}, std::span(nowhere).first(count));
    EXPECT_GE(LinearWeight(table, weight, "linear").most_dot_vectors(), 0) << storage;
  }
}

STOWAGE_ON_EACH_ISA(LinearLinesOn, NumbersOverAllScales) {
  const std::int64_t n = 70, k = 1024;
  const Weight whole = make_weight("nvfp4", {n, k}, Data::normal);
  for (const float outer : {0.0f, 1.0f, -0.5f, 0x1p-90f, 0x1p-110f, 0x1.8p6f, 0x1p7f, 0x1p20f,
                            std::numeric_limits<float>::infinity()}) {
    std::vector<std::vector<std::byte>> room;
    const Weight changed = with_scales(
        whole, room, [&](auto& parts) { std::memcpy(parts[2].data(), &outer, sizeof outer); });
    const Values x = make_values(Dtype::bf16, k, Data::normal, 3);
    EXPECT_EQ(run_one(table, x, changed).bytes, run_one(without_lines(table), x, changed).bytes)
        << outer;
  }
}

}  // namespace
}  // namespace stowage::linear_test
