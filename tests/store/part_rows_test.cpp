// SPDX-License-Identifier: Apache-2.0
// Rows of parts of every way of forming, drawn by chance: what the whole part has of them.
#include "store/part_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "expect_error.h"
#include "store/part_drawings.h"

namespace stowage::test {
namespace {

struct FormOf {
  PartForm form;
  std::int64_t columns;  // a multiple of these
};
const std::vector<FormOf> kFormsOf{
    {kAwq, 8},
    {kTurnedWords, 8},
    {kTiles, 1},
    {{.in_file = 8, .in_part = 8, .word = 32, .transposed = true, .bias = 128}, 4},
    {{.in_file = 16, .in_part = 16, .word = 16, .transposed = true}, 1},
    {{.in_file = 4, .in_part = 8, .word = 32, .axis = PartForm::Axis::rows}, 1},
    {{.in_file = 4, .in_part = 8, .word = 32, .bias = 8}, 1},
    {{.in_file = 4, .in_part = 4, .word = 8, .order = {1, 0, 2, 3, 4, 5, 6, 7}}, 2},
    {{.in_file = 4, .in_part = 4, .word = 8, .record = 18, .at = 2, .span = 16, .halves = 32}, 16},
    {{.in_file = 3, .in_part = 3, .word = 32}, 3},
    {{.in_file = 6, .in_part = 6, .word = 8, .record = 210, .span = 192, .halves = 128}, 192},
    {{.in_file = 4,
      .in_part = 4,
      .word = 8,
      .axis = PartForm::Axis::rows,
      .order = {1, 0, 2, 3, 4, 5, 6, 7},
      .folded = true},
     2},
};

struct PartAndTensor {
  Bytes tensor, part;
};
PartAndTensor drawn_at_random(const PartForm& form, const Shape& shape, std::mt19937& random) {
  const Shape words = tensor_shape(form, shape);
  const bool is_bytes = form.record != 0 || form.halves != 0;
  const std::int64_t bytes = words.elements() * (is_bytes ? 1 : std::max(form.word / 8, 1));
  const Bytes none(static_cast<std::size_t>(bytes));
  Bytes part(part_of_tensor(form, {{"f", "t", 0}, none}, shape, Dtype::bf16).size());
  const unsigned mask = form.in_part == 8 ? (1u << form.in_file) - 1 : 255u;
  for (std::byte& byte : part) byte = static_cast<std::byte>((random() & mask) - form.bias);
  return {tensor_of_part(form, part, shape), part};
}

TEST(PartRows, AreThoseOfThePartInEveryForm) {
  std::mt19937 random(11);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random()) % n; };
  for (int round = 0; round < 400; ++round) {
    const auto& [form, columns] = kFormsOf[static_cast<std::size_t>(round) % kFormsOf.size()];
    const Shape shape{1 + below(round % 3 == 0 ? 300 : 20), columns * (1 + below(40))};
    SCOPED_TRACE(testing::Message() << form_key(form) << " " << to_string(shape));
    if (form.folded && shape.elements() % 2 != 0) continue;
    const PartAndTensor whole = drawn_at_random(form, shape, random);
    const std::int64_t first = below(shape.rows()), last = first + below(shape.rows() - first + 1);
    const std::size_t row = whole.part.size() / static_cast<std::size_t>(shape.rows());
    Bytes out(row * static_cast<std::size_t>(last - first));
    std::uint64_t given = 0;
    const auto read = [&](std::uint64_t offset, std::span<std::byte> bytes) {
      ASSERT_LE(offset + bytes.size(), whole.tensor.size());
      std::memcpy(bytes.data(), whole.tensor.data() + offset, bytes.size());
      given += bytes.size();
    };
    const RowsPlace place{&form, shape, {first, last}, out};
    const std::uint64_t counted =
        form_rows({&place, 1}, {"f", "t", 0}, whole.tensor.size(), Dtype::bf16, read);
    EXPECT_EQ(counted, given);
    EXPECT_LE(given, whole.tensor.size());
    EXPECT_TRUE(std::ranges::equal(
        out, std::span(whole.part).subspan(row * static_cast<std::size_t>(first), out.size())))
        << first << " to " << last;
  }
}

// Rows of words and tiles are read with those beside them; nothing is read for none.
TEST(PartRows, TakeTheBytesOfTheirWords) {
  std::mt19937 random(5);
  struct Count {
    PartForm form;
    Shape shape;
    PartRows rows;
    std::uint64_t of, bytes;  // how many parts of the tensor's rows or columns; of how many
  };
  const std::vector<Count> counts{
      {kAwq, {64, 32}, {8, 16}, 1, 8},         {kAwq, {64, 32}, {9, 17}, 2, 8},
      {kTiles, {256, 16}, {1, 2}, 1, 2},       {kTurnedWords, {64, 32}, {3, 4}, 1, 64},
      {kTurnedWords, {64, 32}, {4, 4}, 0, 64},
  };
  for (const auto& [form, shape, rows, of, bytes] : counts) {
    SCOPED_TRACE(testing::Message() << form_key(form) << " " << rows.first);
    const PartAndTensor whole = drawn_at_random(form, shape, random);
    const std::size_t row = whole.part.size() / static_cast<std::size_t>(shape.rows());
    Bytes out(row * static_cast<std::size_t>(rows.last - rows.first));
    const RowsPlace place{&form, shape, rows, out};
    const auto read = [&](std::uint64_t offset, std::span<std::byte> to) {
      std::memcpy(to.data(), whole.tensor.data() + offset, to.size());
    };
    EXPECT_EQ(form_rows({&place, 1}, {"f", "t", 0}, whole.tensor.size(), Dtype::bf16, read) * bytes,
              of * whole.tensor.size());
  }
}

// A tensor of another size is refused as the whole part is.
TEST(PartRows, RefuseWhatIsNoTensorOfThePart) {
  const Shape shape{64, 32};
  Bytes out(8 * 16);
  const PartForm form = kAwq;
  const RowsPlace place{&form, shape, {8, 16}, out};
  const auto read = [](std::uint64_t, std::span<std::byte> to) {
    std::ranges::fill(to, std::byte{});
  };
  EXPECT_STOWAGE_ERROR(form_rows({&place, 1}, {"f", "t", 0}, 1020, Dtype::bf16, read), bad_file,
                       "1020 bytes");
}

}  // namespace
}  // namespace stowage::test
