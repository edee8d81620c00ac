// SPDX-License-Identifier: Apache-2.0
// Columns in another order than their groups: every kernel against the reference codec.
#include "base/threads.h"
#include "expect_error.h"
#include "fenced.h"
#include "linear_cases.h"
#include "stowage/quantize.h"

namespace stowage::named_test {
namespace {

using namespace stowage::samples;

const std::vector<std::string> kStorages{
    "int4:block32:actorder",      "int4:block6:bf16:zero:actorder",
    "int4:block2:f16:actorder",   "int4:block128:f16:zero:actorder",
    "int8:block7:f16:actorder",   "int8:block32:zero:actorder",
    "int8:block64:bf16:actorder", "int8:block3:f16:zero:actorder",
    "int3:block32:bf16:actorder", "int6:block8:zero:actorder"};
const std::vector<Shape> kShapes{{1, 2}, {3, 6},    {7, 66}, {33, 130}, {5, 0},
                                 {0, 6}, {2, 4100}, {3, 8},  {33, 136}, {2, 4104}};

template <class T>
void put(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
}

// Any codes, scales of any size and sign with some that are none, any zeros; any order of groups:
// at random, each as often as another, or the plain one.
Parts made(const Storage& storage, const Shape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Parts parts(storage, shape);
  for (std::byte& code : parts.bytes[0]) code = static_cast<std::byte>(random());
  const Shape& scales = parts.layout.parts[1].shape;
  for (std::int64_t i = 0; i < scales.elements(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    float scale = std::ldexp(normal(random), static_cast<int>(random() % 20) - 10);
    if (random() % 50 == 0) scale = std::numeric_limits<float>::infinity();
    if (random() % 50 == 0) scale = std::numeric_limits<float>::quiet_NaN();
    if (storage.scaling.type == ScaleType::bf16)
      put(parts.bytes[1], at, f32_to_bf16(scale));
    else if (storage.scaling.type == ScaleType::f16)
      put(parts.bytes[1], at, f32_to_f16(scale));
    else
      put(parts.bytes[1], at, scale);
    const int zero = static_cast<int>(random() % 16) - 8;
    if (storage.scaling.zero == Zero::code) put(parts.bytes[2], at, static_cast<std::int8_t>(zero));
  }
  const auto columns = static_cast<std::size_t>(shape[1]);
  const auto count = std::max<std::int64_t>(scales[1], 1);
  std::vector<std::int32_t> groups(columns);
  for (std::size_t k = 0; k < columns; ++k)
    groups[k] = seed % 3 == 0 ? static_cast<std::int32_t>(random()) & 0x7fffffff
                              : static_cast<std::int32_t>(k) / storage.scaling.block;
  if (seed % 3 == 1) std::ranges::shuffle(groups, random);
  for (std::size_t k = 0; k < columns; ++k)
    put(parts.bytes.back(), k, static_cast<std::int32_t>(groups[k] % count));
  return parts;
}

template <class Body>
void for_each_weight(const Body& body) {
  unsigned seed = 0;
  for (const std::string& name : kStorages)
    for (const Shape& shape : kShapes)
      for (int i = 0; i < 3; ++i) {
        SCOPED_TRACE(name + to_string(shape) + " seed " + std::to_string(seed));
        const Storage storage = parse_storage(name);
        if (!holds(storage, shape)) continue;
        const Parts parts = made(storage, shape, seed++);
        body(parts.weight(storage, shape));
      }
}

STOWAGE_ON_EACH_ISA(Named, RowsAndColumnsAreThoseOfTheReference) {
  for_each_weight([&](const Weight& weight) {
    const std::int64_t rows = weight.rows(), row = weight.row_elements();
    for (const Dtype out : kValueTypes) {
      const Bytes all = reference_values(weight, out);
      const auto bytes = static_cast<std::int64_t>(width(out));
      Bytes got(all.size() + 1, std::byte{0x5A});
      dequantize_with(table, weight, {0, rows}, got.data(), out, *make_pool(2));
      EXPECT_TRUE(std::equal(all.begin(), all.end(), got.begin())) << disk_name(out);
      EXPECT_EQ(got.back(), std::byte{0x5A});
      for (const Range columns : {Range{row / 3, row}, Range{0, row / 2}, Range{row / 2, row}}) {
        Bytes expected;
        for (std::int64_t i = rows / 3; i < rows; ++i)
          expected.insert(expected.end(), all.begin() + bytes * (i * row + columns.begin),
                          all.begin() + bytes * (i * row + columns.end));
        Bytes some(expected.size() + 1);
        dequantize_with(table, weight, {rows / 3, rows}, columns, some.data(), out,
                        inline_executor());
        some.pop_back();
        EXPECT_TRUE(some == expected) << disk_name(out) << " columns " << columns.begin;
      }
      std::vector<std::int64_t> ids;
      for (std::int64_t i = 0; i < rows; i += 2) ids.push_back(rows - 1 - i);
      Bytes picked(ids.size() * static_cast<std::size_t>(row * bytes) + 1);
      embedding_with(table, weight, ids.data(), static_cast<std::int64_t>(ids.size()),
                     picked.data(), out, inline_executor());
      for (std::size_t i = 0; i < ids.size(); ++i)
        EXPECT_EQ(
            std::memcmp(picked.data() + i * static_cast<std::size_t>(row * bytes),
                        all.data() + ids[i] * row * bytes, static_cast<std::size_t>(row * bytes)),
            0)
            << disk_name(out) << " row " << ids[i];
    }
  });
}

// Codes, groups, scales, zeros and values against fences: nothing beside them is touched.
STOWAGE_ON_EACH_ISA(Named, TouchesNothingOutsideItsRun) {
  constexpr std::int64_t kLongest = 67, kStarts = 3, kGroups = 5;
  std::mt19937 random(5);
  std::vector<std::uint8_t> all(kLongest + kStarts);
  std::vector<std::int32_t> named(all.size());
  std::vector<float> scales(kGroups), zeros(kGroups);
  for (auto& code : all) code = static_cast<std::uint8_t>(random());
  for (auto& group : named) group = static_cast<std::int32_t>(random() % kGroups);
  for (auto& scale : scales) scale = static_cast<float>(random() % 100) * 0.37f;
  for (auto& zero : zeros) zero = static_cast<float>(random() % 16) - 8;
  const Fenced a(all.size()), b(named.size() * 4), c(kGroups * 4), d(kGroups * 4), e(8 * 70);
  const auto check = [&](Codes codes, Dtype out, Fenced::Against against, bool zero,
                         std::int64_t first, std::int64_t n) {
    const auto last = static_cast<std::size_t>(first + n);
    const auto piece = [&](const Fenced& at, const auto& from, std::size_t count) {
      return at.piece(std::as_bytes(std::span(from).first(count)), against);
    };
    const char* const from = piece(a, all, codes == Codes::int4 ? (last + 1) / 2 : last);
    const auto* const groups = reinterpret_cast<const std::int32_t*>(piece(b, named, last));
    const auto* const s = reinterpret_cast<const float*>(piece(c, scales, kGroups));
    const auto* const z = reinterpret_cast<const float*>(piece(d, zeros, kGroups));
    const NamedGroups by_name{groups, kGroups - 1, zero ? z : nullptr};
    char* const to = e.piece(static_cast<std::size_t>(n) * width(out), against);
    table.dequantize.to[static_cast<int>(codes)][value_index(out)](
        {from, first, s, 1, n, nullptr, nullptr, &by_name}, to);
    for (std::int64_t i = 0; i < n && out == Dtype::f32; ++i) {
      const auto at = static_cast<std::size_t>(first + i),
                 group = static_cast<std::size_t>(named[at]);
      const unsigned byte = all[codes == Codes::int4 ? at / 2 : at];
      const unsigned code = codes == Codes::int8 ? byte : at % 2 == 0 ? byte & 15u : byte >> 4;
      const float value = trait(codes).values[code] - (zero ? zeros[group] : 0.0f);
      ASSERT_EQ(reinterpret_cast<const float*>(to)[i], value * scales[group]);
    }
  };
  for (const Codes codes : {Codes::int4, Codes::int8})
    for (const Dtype out : kValueTypes)
      for (const auto against : {Fenced::Against::end, Fenced::Against::begin})
        for (const bool zero : {false, true})
          for (std::int64_t n = 0; n <= kLongest; ++n)
            for (std::int64_t first = 0; first < kStarts; ++first)
              check(codes, out, against, zero, first, n);
}

STOWAGE_ON_EACH_ISA(Named, ProductsAreWithinTheBound) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  using namespace stowage::linear_test;
  for (const std::string& name : kStorages)
    for (const auto& [m, n, k] : {Sizes{1, 70, 256},
                                  {1, 5, 2100},
                                  {3, 66, 192},
                                  {17, 21, 300},
                                  {40, 130, 96},
                                  {5, 15, 16}}) {
      const Storage storage = parse_storage(name);
      if (!holds(storage, {n, k})) continue;
      Parts parts = made(storage, {n, k}, static_cast<unsigned>(m) * 3 + 1);
      for (std::int64_t i = 0; i < parts.layout.parts[1].shape.elements(); ++i) {
        const auto at = static_cast<std::size_t>(i);
        const float scale = static_cast<float>(i % 7 + 1) * 0.125f;
        if (storage.scaling.type == ScaleType::f32)
          put(parts.bytes[1], at, scale);
        else
          put(parts.bytes[1], at,
              storage.scaling.type == ScaleType::bf16 ? f32_to_bf16(scale) : f32_to_f16(scale));
      }
      const Weight weight = parts.weight(storage, {n, k});
      for (const Dtype dtype : kDtypes) {
        const auto& x = make_values(dtype, m * k, Data::normal, 2);
        const auto& g = make_values(dtype, m * n, Data::normal, 3);
        const std::string what = name + " " + std::string(disk_name(dtype));
        expect_within_bound(run_linear(table, x, m, weight, nullptr, inline_executor()),
                            exact(x, m, weight, nullptr), k, "linear " + what);
        expect_within_bound(run_gradient(table, g, m, weight, inline_executor()),
                            exact(g, m, weight, nullptr, true), n, "gradient " + what);
      }
    }
}

// A part that says what no weight has, which no reader lets through, is not followed.
STOWAGE_ON_EACH_ISA(Named, AGroupThatIsNotThereReadsNothingElse) {
  const Storage storage = parse_storage("int8:block2:zero:actorder");
  const Fenced scales(2 * sizeof(float)), zeros(2);
  const std::vector<std::uint8_t> codes{1, 2, 3, 4};
  const std::vector<std::int32_t> groups{2, -1, 0x7fffffff, -0x7fffffff - 1};
  const std::vector<float> two{1, 3};
  const char* const s = scales.piece(std::as_bytes(std::span(two)), Fenced::Against::end);
  const Bytes none(2);
  const char* const z = zeros.piece(none, Fenced::Against::end);
  const Weight weight(storage, {1, 4}, std::vector<const void*>{codes.data(), s, z, groups.data()});
  std::vector<float> values(4);
  dequantize_with(table, weight, {0, 1}, values.data(), Dtype::f32, inline_executor());
  EXPECT_EQ(values, (std::vector<float>{3, 2, 9, 4}));
}

TEST(NamedErrors, ValuesAloneDoNotMakeSuchAWeight) {
  const std::vector<float> values(8);
  EXPECT_STOWAGE_ERROR(
      (void)quantize(values.data(), Dtype::f32, {2, 4}, parse_storage("int8:block2:actorder")),
      invalid_argument, "such as int8:block2, got int8:block2:actorder");
}

}  // namespace
}  // namespace stowage::named_test
