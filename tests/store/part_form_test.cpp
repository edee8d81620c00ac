// SPDX-License-Identifier: Apache-2.0
// Parts of weights in the forms of dialects: each number where the drawings of the dialects have
// it, both ways, and nothing else in the tensor.
#include "store/part_form.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "stowage/error.h"

namespace stowage::test {
namespace {

using Axis = PartForm::Axis;
using Bytes = std::vector<std::byte>;

constexpr PartForm kTiles{.in_file = 8, .in_part = 8, .word = 8, .tiled = true};
constexpr PartForm kHalves{
    .in_file = 4, .in_part = 4, .word = 8, .order = {1, 0, 2, 3, 4, 5, 6, 7}};
constexpr PartForm kRagged{.in_file = 4, .in_part = 4, .word = 32};
constexpr PartForm kBytesInWords{.in_file = 8, .in_part = 8, .word = 32, .bias = 128};
constexpr PartForm kTurned{.in_file = 16, .in_part = 16, .word = 16, .transposed = true};
constexpr PartForm kTurnedWords{.in_file = 4, .in_part = 4, .word = 32, .transposed = true};
constexpr PartForm kZerosDown{
    .in_file = 4, .in_part = 8, .word = 32, .axis = Axis::rows, .bias = 8};
constexpr PartForm kLessOne{.in_file = 4,
                            .in_part = 8,
                            .word = 32,
                            .axis = Axis::rows,
                            .transposed = true,
                            .bias = 8,
                            .less = 1};
constexpr PartForm kAwq{.in_file = 4,
                        .in_part = 4,
                        .word = 32,
                        .axis = Axis::rows,
                        .order = {0, 2, 4, 6, 1, 3, 5, 7},
                        .transposed = true};

struct Size {
  std::int64_t rows, columns;  // in numbers
};

Shape part_shape(const PartForm& form, const Size& size) {
  return {size.rows, form.in_part == 4 ? size.columns / 2 : size.columns};
}

// Numbers of the widths that a file has for them, at random; `fill` for all of their bits.
Bytes some_part(const PartForm& form, const Size& size, std::mt19937& random, bool fill = false) {
  Bytes made(static_cast<std::size_t>(size.rows * size.columns * form.in_part / 8));
  const std::uint32_t mask = (1u << form.in_file) - 1;
  for (std::size_t i = 0; i < made.size(); ++i) {
    std::uint32_t byte = fill ? 0xff : static_cast<std::uint32_t>(random());
    if (form.in_part == 8) byte = (byte & mask) - form.bias;
    made[i] = static_cast<std::byte>(byte);
  }
  return made;
}

std::uint32_t number_at(const PartForm& form, const Bytes& part, const Size& size, std::int64_t row,
                        std::int64_t column) {
  const auto at = static_cast<std::size_t>(row * size.columns + column);
  std::uint16_t found = 0;
  if (form.in_part == 16) std::memcpy(&found, part.data() + 2 * at, 2);
  if (form.in_part == 8) found = std::to_integer<std::uint8_t>(part[at]);
  if (form.in_part == 4) found = std::to_integer<std::uint8_t>(part[at / 2]) >> (4 * (at % 2)) & 15;
  return (found + form.bias) & ((1u << form.in_file) - 1);
}

// The place in the tensor of the lowest bit of a number: of one row, one column, one order.
using Drawing = std::function<std::int64_t(std::int64_t row, std::int64_t column)>;

// What drawings say: bits alone, from each number of the part.
Bytes drawn(const PartForm& form, const Bytes& part, const Size& size, std::size_t bytes,
            const Drawing& drawing) {
  Bytes made(bytes);
  for (std::int64_t row = 0; row < size.rows; ++row) {
    for (std::int64_t column = 0; column < size.columns; ++column) {
      const std::uint32_t number = number_at(form, part, size, row, column);
      for (int bit = 0; bit < form.in_file; ++bit) {
        const auto at = static_cast<std::size_t>(drawing(row, column) + bit);
        made.at(at / 8) |= static_cast<std::byte>((number >> bit & 1) << at % 8);
      }
    }
  }
  if (form.less == 0) return made;
  for (std::size_t at = 0; at < made.size(); at += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, made.data() + at, sizeof word);
    word -= 0x11111111u * form.less;
    std::memcpy(made.data() + at, &word, sizeof word);
  }
  return made;
}

void expect_both_ways(const PartForm& form, const Bytes& part, const Size& size,
                      const Bytes& tensor) {
  const Shape shape = part_shape(form, size);
  ASSERT_EQ(form.word * tensor_shape(form, shape).elements(), 8 * std::ssize(tensor));
  EXPECT_EQ(tensor_of_part(form, part, shape), tensor);
  EXPECT_EQ(part_of_tensor(form, {{"f", "t", 0}, tensor}, shape, Dtype::bf16), part);
}

TEST(PartForm, LiesAsTheDialectsDrawIt) {
  std::mt19937 random(1);
  const auto check = [&](const PartForm& form, const Size& size, std::size_t bytes,
                         const Drawing& drawing) {
    SCOPED_TRACE(form_key(form));
    const Bytes part = some_part(form, size, random);
    expect_both_ways(form, part, size, drawn(form, part, size, bytes, drawing));
  };
  // Tiles of 128 rows by 4 columns, 512 bytes each.
  check(kTiles, {192, 5}, 2048, [](std::int64_t r, std::int64_t c) {
    return 8 * ((r / 128 * 2 + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4);
  });
  // byte j: [7..4: column 2j | 3..0: column 2j + 1]
  check(kHalves, {3, 50}, 75,
        [](std::int64_t r, std::int64_t c) { return 8 * (r * 25 + c / 2) + (c % 2 == 0 ? 4 : 0); });
  // compressed-tensors: element i of a row at bits i*b, 4 and 8 of them, q + 128; whole words.
  check(kRagged, {70, 100}, 70 * 52,
        [](std::int64_t r, std::int64_t c) { return 32 * 13 * r + 4 * c; });
  check(kBytesInWords, {70, 102}, 70 * 104,
        [](std::int64_t r, std::int64_t c) { return 32 * 26 * r + 8 * c; });
  check(kTurned, {40, 33}, 2640, [](std::int64_t r, std::int64_t c) { return 16 * (c * 40 + r); });
  // GPTQ, word r of column o: bits 4j to 4j + 3 are q[8r + j, o]; v1 has z - 1 of o = 8c + j.
  check(kTurnedWords, {40, 64}, 1280,
        [](std::int64_t o, std::int64_t k) { return 32 * (k / 8 * 40 + o) + k % 8 * 4; });
  check(kLessOne, {40, 3}, 60,
        [](std::int64_t o, std::int64_t g) { return 32 * (g * 5 + o / 8) + o % 8 * 4; });
  // compressed-tensors: down a column.
  check(kZerosDown, {21, 5}, 60,
        [](std::int64_t o, std::int64_t g) { return 32 * (o / 8 * 5 + g) + o % 8 * 4; });
  // AWQ, word c: bits 4j to 4j + 3 are column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[j]
  check(kAwq, {24, 40}, 480, [](std::int64_t o, std::int64_t k) {
    constexpr std::array<int, 8> kSlot{0, 4, 1, 5, 2, 6, 3, 7};
    return 32 * (k * 3 + o / 8) + kSlot[static_cast<std::size_t>(o % 8)] * 4;
  });
}

PartForm some_form(std::mt19937& random) {
  const auto one_of = [&](std::initializer_list<int> all) {
    return static_cast<std::uint8_t>(all.begin()[random() % all.size()]);
  };
  PartForm form;
  do {
    form = {
        .in_file = one_of({4, 8, 16}), .in_part = one_of({4, 8, 16}), .word = one_of({8, 16, 32})};
    form.axis = static_cast<Axis>(random() % 2);
    form.transposed = random() % 2 == 0, form.tiled = random() % 4 == 0;
    if (random() % 2 == 0) form.bias = one_of({1, 8, 128});
    if (random() % 2 == 0 && form.in_file == 4 && form.word == 32) form.less = one_of({1, 5});
    if (random() % 2 == 0 && form.in_file != 0 && form.word >= form.in_file)
      std::shuffle(form.order.begin(), form.order.begin() + form.word / form.in_file, random);
  } while (!is_legal(form));
  return form;
}

// The same as drawings, for any form.
Drawing drawing_of(const PartForm& form, const Size& size) {
  const std::int64_t width = tensor_shape(form, part_shape(form, size))[1];
  return [=](std::int64_t row, std::int64_t column) {
    const int run = form.word / form.in_file;
    std::int64_t& along = form.axis == Axis::rows ? row : column;
    const auto slot = std::ranges::find(form.order, along % run) - form.order.begin();
    along /= run;
    if (form.transposed) std::swap(row, column);
    std::int64_t word = row * width + column;
    if (form.tiled)
      word = (row / 128 * (width / 4) + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
             column % 4;
    return word * form.word + slot * form.in_file;
  };
}

TEST(PartForm, ComesBackWhateverItIs) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 600; ++trial) {
    const PartForm form = some_form(random);
    Size size{1 + static_cast<std::int64_t>(random() % 70),
              2 * (1 + static_cast<std::int64_t>(random() % 40))};
    if (random() % 2 == 0) size = {size.rows / 8 * 8, size.columns / 8 * 8};
    SCOPED_TRACE(testing::Message()
                 << form_key(form) << " of " << size.rows << " " << size.columns);
    const Shape shape = part_shape(form, size);
    const auto bytes =
        static_cast<std::size_t>(tensor_shape(form, shape).elements()) * form.word / 8;
    const Bytes part = some_part(form, size, random);
    expect_both_ways(form, part, size, drawn(form, part, size, bytes, drawing_of(form, size)));
    EXPECT_EQ(form_from_key(form_key(form)), form);
  }
}

TEST(PartForm, HasNoBitsThatBelongToNothing) {
  std::mt19937 random(3);
  int strays = 0;
  for (int trial = 0; trial < 100; ++trial) {
    PartForm form = some_form(random);
    form.less = 0;
    const Size size{1 + static_cast<std::int64_t>(random() % 30),
                    2 * (1 + static_cast<std::int64_t>(random() % 12))};
    const Shape shape = part_shape(form, size);
    const Bytes taken = tensor_of_part(form, some_part(form, size, random, true), shape);
    for (std::size_t bit = 0; bit < 8 * taken.size();
         bit += 1 + random() % (1 + taken.size() / 20)) {
      const std::byte one{static_cast<unsigned char>(1 << bit % 8)};
      Bytes tensor(taken.size());
      tensor[bit / 8] = one;
      const auto read = [&] {
        return part_of_tensor(form, {{"f", "t", 100}, tensor}, shape, Dtype::bf16);
      };
      if ((taken[bit / 8] & one) != std::byte{0}) {
        EXPECT_NO_THROW(read());
        continue;
      }
      ++strays;
      try {
        read();
        ADD_FAILURE() << form_key(form) << ": bit " << bit;
      } catch (const Error& error) {
        const std::size_t first =
            form.in_file == 4 ? bit / 8 : bit / form.in_file * form.in_file / 8;
        EXPECT_THAT(error.what(), testing::HasSubstr("byte " + std::to_string(100 + first) + ":"));
      }
    }
  }
  EXPECT_GT(strays, 1000);
}

// A hostile file may have any number of rows without columns.
TEST(PartForm, TakesNoTimeForRowsOfNothing) {
  constexpr std::int64_t kMany = std::int64_t{1} << 62;
  for (const PartForm& form : {kTiles, kHalves, kTurned, kZerosDown, kAwq}) {
    for (const Shape& part : {Shape{kMany, 0}, Shape{0, kMany}}) {
      EXPECT_TRUE(part_of_tensor(form, {{"f", "t", 0}, {}}, part, Dtype::bf16).empty());
      EXPECT_TRUE(tensor_of_part(form, {}, part).empty());
    }
  }
}

TEST(PartForm, RefusesWhatATensorHasNoBitsFor) {
  const Bytes part(3, std::byte{8});  // zero points of int4 end at 7
  EXPECT_THROW(tensor_of_part(kZerosDown, part, {3, 1}), Error);
  EXPECT_THROW(tensor_of_part(kZerosDown, part, {2, 1}), Error) << "another size";
  EXPECT_THROW(tensor_of_part({.rounded = true}, part, {3, 1}), Error);
  EXPECT_THROW(part_of_tensor(kZerosDown, {{"f", "t", 0}, part}, {3, 1}, Dtype::bf16), Error);
}

TEST(PartForm, HasAKey) {
  EXPECT_EQ(form_key({}), 0);
  EXPECT_EQ(form_from_key(0), PartForm{});
  EXPECT_EQ(form_key({.rounded = true}), 1);
  EXPECT_EQ(form_from_key(1), PartForm{.rounded = true});
  const std::int64_t key = form_key(kAwq);
  for (const std::int64_t bad :
       {std::int64_t{2}, std::int64_t{-1}, key + 1, key | std::int64_t{1} << 62,
        key ^ std::int64_t{1} << 38, key | std::int64_t{1} << 22})
    EXPECT_THROW(form_from_key(bad), Error) << bad;
}

}  // namespace
}  // namespace stowage::test
