// SPDX-License-Identifier: Apache-2.0
// Groups of one column, whose rows lie apart: every kernel against the reference codec.
#include "base/threads.h"
#include "expect_error.h"
#include "fenced.h"
#include "linear_cases.h"
#include "stowage/quantize.h"

namespace stowage::columns_test {
namespace {

using namespace stowage::samples;

const std::vector<std::string> kStorages{
    "uint4:column2:zero_rounded",      "uint4:column64:bf16:zero_rounded",
    "uint4:column4:f16:zero_rounded",  "uint4:column6:bf16:zero_rounded",
    "uint4:column32:f16:zero_rounded", "uint4:column10:zero_rounded"};
const std::vector<Shape> kShapes{{2, 2},   {4, 6},    {64, 66},   {128, 70}, {60, 130},
                                 {64, 0},  {0, 6},    {6, 4100},  {32, 36},  {192, 16},
                                 {96, 34}, {2, 4104}, {128, 254}, {20, 10},  {4, 9000}};

template <class Body>
void for_each_weight(const Body& body) {
  for (const std::string& name : kStorages)
    for (const Shape& shape : kShapes) {
      const Storage storage = parse_storage(name);
      if (!holds(storage, shape)) continue;
      SCOPED_TRACE(name + to_string(shape));
      std::mt19937 random(static_cast<unsigned>(shape.elements()));
      Parts parts(storage, shape);  // any codes, scales and zeros, which may be no numbers
      for (Bytes& part : parts.bytes)
        for (std::byte& byte : part) byte = static_cast<std::byte>(random());
      body(parts.weight(storage, shape));
    }
}

STOWAGE_ON_EACH_ISA(Columns, RowsAndColumnsAreThoseOfTheReference) {
  for_each_weight([&](const Weight& weight) {
    const std::int64_t rows = weight.rows(), row = weight.row_elements();
    for (const Dtype out : kValueTypes) {
      const Bytes all = reference_values(weight, out);
      const auto bytes = static_cast<std::int64_t>(width(out));
      Bytes got(all.size() + 1, std::byte{0x5A});
      dequantize_with(table, weight, {0, rows}, got.data(), out, *make_pool(2));
      EXPECT_TRUE(std::equal(all.begin(), all.end(), got.begin())) << disk_name(out);
      EXPECT_EQ(got.back(), std::byte{0x5A});
      for (const Range columns : {Range{row / 3, row}, Range{0, row / 2}, Range{row / 2, row},
                                  Range{std::min<std::int64_t>(row, 1), row}}) {
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

// Codes, scales, zeros and values against fences: nothing beside them is touched.
STOWAGE_ON_EACH_ISA(Columns, TouchesNothingOutsideItsRun) {
  constexpr std::int64_t kLongest = 67, kStarts = 3;
  std::mt19937 random(5);
  std::vector<std::uint8_t> all((kLongest + kStarts) / 2);
  std::vector<float> scales(kLongest + kStarts), zeros(scales.size());
  for (auto& code : all) code = static_cast<std::uint8_t>(random());
  for (auto& scale : scales) scale = static_cast<float>(random() % 100) * 0.37f;
  for (auto& zero : zeros) zero = static_cast<float>(random() % 16) * 0.3f;
  const Fenced a(all.size()), b(scales.size() * 4), c(zeros.size() * 4), d(8 * 70);
  const auto check = [&](Dtype out, Fenced::Against against, std::int64_t first, std::int64_t n) {
    const auto last = static_cast<std::size_t>(first + n);
    const auto piece = [&](const Fenced& at, const auto& from, std::size_t count) {
      return at.piece(std::as_bytes(std::span(from).first(count)), against);
    };
    const char* const from = piece(a, all, (last + 1) / 2);
    const auto* const s = reinterpret_cast<const float*>(piece(b, scales, last));
    const auto* const z = reinterpret_cast<const float*>(piece(c, zeros, last));
    char* const to = d.piece(static_cast<std::size_t>(n) * width(out), against);
    stowage::Run run{from, first, s, 1, n};
    run.offsets = z, run.rounds = Dtype::f32;
    table.dequantize.to[static_cast<int>(Codes::uint4)][value_index(out)](run, to);
    for (std::int64_t i = 0; i < n && out == Dtype::f32; ++i) {
      const auto at = static_cast<std::size_t>(first + i);
      const auto code = static_cast<float>(at % 2 == 0 ? all[at / 2] & 15u : all[at / 2] >> 4);
      const float distance = code - zeros[at];
      ASSERT_EQ(reinterpret_cast<const float*>(to)[i], distance * scales[at]);
    }
  };
  for (const Dtype out : kValueTypes)
    for (const auto against : {Fenced::Against::end, Fenced::Against::begin})
      for (std::int64_t n = 0; n <= kLongest; ++n)
        for (std::int64_t first = 0; first < kStarts; ++first) check(out, against, first, n);
}

STOWAGE_ON_EACH_ISA(Columns, ProductsAreWithinTheBound) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  using namespace stowage::linear_test;
  for (const std::string& name : kStorages)
    for (const auto& [m, n, k] : {Sizes{1, 64, 256},
                                  {1, 10, 2100},
                                  {3, 192, 64},
                                  {17, 60, 300},
                                  {40, 128, 96},
                                  {5, 6, 16}}) {
      if (!holds(parse_storage(name), {n, k})) continue;
      const Weight weight = make_weight(name, {n, k}, Data::normal);
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

// More columns than a task has, and tasks that would end inside of a byte; groups of more rows than
// columns are taken together.
STOWAGE_ON_EACH_ISA(Columns, AreQuantizedByAnyNumberOfTasks) {
  struct Case {
    const char* storage;
    Shape shape;
  };
  for (const auto& [name, shape] : {Case{"uint4:column6:bf16:zero_rounded", {12, 44002}},
                                    Case{"uint4:column2:zero_rounded", {2, 140002}},
                                    Case{"uint4:column64:f16:zero_rounded", {128, 3002}},
                                    Case{"uint4:column131074:bf16:zero_rounded", {131074, 4}},
                                    Case{"uint4:column1000:bf16:zero_rounded", {2000, 134}}}) {
    const Storage storage = parse_storage(name);
    const auto n = static_cast<std::size_t>(shape.elements());
    for (const Dtype in : {Dtype::bf16, Dtype::f32}) {
      const Bytes values = as_type(numbers(Kind::normal, n), in);
      Parts got(storage, shape);
      const Parts expected = reference_parts(values, in, shape, storage);
      const auto pool = make_pool(2);
      quantize_with(table, values.data(), in, shape, storage, got.writable(),
                    {.executor = pool.get()});
      EXPECT_TRUE(got.bytes == expected.bytes) << name << " from " << disk_name(in);
    }
  }
}

TEST(ColumnsErrors, ValuesMustBeFinite) {
  std::vector<float> values(8);
  values[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_STOWAGE_ERROR((void)quantize(values.data(), Dtype::f32, {4, 2},
                                      parse_storage("uint4:column2:bf16:zero_rounded")),
                       invalid_argument,
                       "values must be finite in uint4:column2:bf16:zero_rounded, got nan at");
}

}  // namespace
}  // namespace stowage::columns_test
