// SPDX-License-Identifier: Apache-2.0
// Parts of numbers of 2, 3, 5, 6 and 7 bits: where each bit lies in words of 32 and in the planes
// of GGUF, drawn from the number's place, both ways, and nothing else in the tensor.
#include "store/part_strings.h"

#include <gmock/gmock.h>

#include <functional>
#include <random>

#include "store/part_form.h"
#include "stowage/error.h"

namespace stowage::test {
namespace {

using Axis = PartForm::Axis;
using Bytes = std::vector<std::byte>;
using Place = std::function<std::int64_t(std::int64_t row, std::int64_t column, int bit)>;

constexpr PartForm kPlanes{
    .in_file = 6, .in_part = 6, .word = 8, .record = 210, .span = 192, .halves = 128};

bool bit_at(const Bytes& bytes, std::int64_t bit) {
  return (std::to_integer<int>(bytes.at(static_cast<std::size_t>(bit / 8))) >> bit % 8 & 1) != 0;
}
void set_bit(Bytes& bytes, std::int64_t bit) {
  bytes.at(static_cast<std::size_t>(bit / 8)) |= static_cast<std::byte>(1 << bit % 8);
}

PartForm codes_of(int bits, bool string) {
  const auto width = static_cast<std::uint8_t>(bits);
  return {.in_file = width, .in_part = width, .word = 32, .string = string};
}
PartForm zeros_of(int bits, bool string) {
  return {.in_file = static_cast<std::uint8_t>(bits),
          .in_part = 8,
          .word = 32,
          .axis = Axis::rows,
          .bias = static_cast<std::uint8_t>(1 << (bits - 1)),
          .string = string};
}

// Number i of a line: in the whole string, or in words that have whole ones.
std::int64_t along(const PartForm& form, std::int64_t i, int bit) {
  if (form.string) return i * form.in_file + bit;
  return i / (32 / form.in_file) * 32 + i % (32 / form.in_file) * form.in_file + bit;
}

Bytes some_bytes(std::int64_t count, std::mt19937& random) {
  Bytes made(static_cast<std::size_t>(count));
  for (std::byte& byte : made) byte = static_cast<std::byte>(random());
  return made;
}

void expect_strings_both_ways(const PartForm& form, const Bytes& part, const Shape& shape,
                              const Bytes& tensor) {
  ASSERT_EQ(form.word / 8 * tensor_shape(form, shape).elements(), std::ssize(tensor));
  EXPECT_EQ(tensor_of_part(form, part, shape), tensor);
  EXPECT_EQ(part_of_tensor(form, {{"f", "t", 0}, tensor}, shape, Dtype::bf16), part);
  EXPECT_EQ(form_from_key(form_key(form)), form);
}

TEST(PartStrings, CodesOfARowAreOneStringOrWholeOnesOfAWord) {
  std::mt19937 random(1);
  for (const int bits : {2, 3, 5, 6, 7})
    for (const bool string : {false, true})
      for (const std::int64_t columns : {8, 24, 40, 128, 200, 264}) {
        const PartForm form = codes_of(bits, string);
        SCOPED_TRACE(testing::Message() << bits << " bits, " << columns << (string ? " s" : " w"));
        const std::int64_t rows = 5, row = columns * bits / 8;
        const std::int64_t run = 32 / bits;
        const std::int64_t words = string ? (columns * bits + 31) / 32 : (columns + run - 1) / run;
        const Bytes part = some_bytes(rows * row, random);
        Bytes tensor(static_cast<std::size_t>(rows * words * 4));
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c)
            for (int bit = 0; bit < bits; ++bit)
              if (bit_at(part, r * row * 8 + c * bits + bit))
                set_bit(tensor, r * words * 32 + along(form, c, bit));
        expect_strings_both_ways(form, part, {rows, row}, tensor);
      }
}

TEST(PartStrings, ZeroPointsLieTheSameDownAColumn) {
  std::mt19937 random(2);
  for (const int bits : {2, 3, 5, 6, 7})
    for (const bool string : {false, true})
      for (const std::int64_t rows : {1, 10, 33, 64, 100}) {
        const PartForm form = zeros_of(bits, string);
        SCOPED_TRACE(testing::Message() << bits << " bits, " << rows << (string ? " s" : " w"));
        const std::int64_t columns = 3, run = 32 / bits;
        const std::int64_t words = string ? (rows * bits + 31) / 32 : (rows + run - 1) / run;
        Bytes part, tensor(static_cast<std::size_t>(words * columns * 4));
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c) {
            const int code = static_cast<int>(random()) & ((1 << bits) - 1);
            part.push_back(static_cast<std::byte>(code - form.bias));
            for (int bit = 0; bit < bits; ++bit) {
              const std::int64_t at = along(form, r, bit);
              if ((code >> bit & 1) != 0) set_bit(tensor, (at / 32 * columns + c) * 32 + at % 32);
            }
          }
        expect_strings_both_ways(form, part, {rows, columns}, tensor);
      }
}

// GGUF's Q6_K, halves of 128: number l of each quarter of 32 has its low bits in ql[l], ql[l + 32],
// low and then high, and its upper two at 0, 2, 4, 6 of qh[l].
TEST(PartStrings, CodesOfSixBitsLieInTwoPlanes) {
  std::mt19937 random(3);
  const std::int64_t rows = 3, columns = 512, blocks = columns / 256;
  const Bytes part = some_bytes(rows * columns * 6 / 8, random);
  Bytes tensor(static_cast<std::size_t>(rows * blocks * 210));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t record = (r * blocks + c / 256) * 210, half = c % 256 / 128;
      const std::int64_t quarter = c % 128 / 32, l = c % 32;
      const std::int64_t low = record + half * 64 + quarter % 2 * 32 + l;
      const std::int64_t high = record + 128 + half * 32 + l;
      for (int bit = 0; bit < 6; ++bit) {
        if (!bit_at(part, (r * columns + c) * 6 + bit)) continue;
        set_bit(tensor,
                bit < 4 ? low * 8 + quarter / 2 * 4 + bit : high * 8 + quarter * 2 + bit - 4);
      }
    }
  const Shape shape{rows, columns * 6 / 8};
  EXPECT_EQ(tensor_shape(kPlanes, shape), (Shape{rows, blocks * 210}));
  EXPECT_EQ(tensor_of_part(kPlanes, part, shape), tensor);
  EXPECT_EQ(part_of_tensor(kPlanes, {{"f", "t", 0}, tensor}, shape, Dtype::bf16), part);
  EXPECT_EQ(form_from_key(form_key(kPlanes)), kPlanes);
}

TEST(PartStrings, BitsOfNoNumberMustBeZero) {
  for (const bool string : {false, true}) {
    for (const PartForm& form : {codes_of(3, string), zeros_of(3, string)}) {
      const bool rows = form.axis == Axis::rows;
      const Shape shape = rows ? Shape{40, 1} : Shape{1, 15};  // 40 numbers
      Bytes full(static_cast<std::size_t>(shape.elements()),
                 rows ? std::byte{0x03} : std::byte{0xff});
      const Bytes taken = tensor_of_part(form, full, shape);
      ASSERT_EQ(taken.size(), 16u);  // 128 bits, of which 120 are those of numbers
      for (std::int64_t bit = 0; bit < 128; ++bit) {
        Bytes tensor(taken.size());
        set_bit(tensor, bit);
        const auto read = [&] {
          return part_of_tensor(form, {{"f", "t", 100}, tensor}, shape, Dtype::bf16);
        };
        if (bit_at(taken, bit)) {
          EXPECT_NO_THROW(read()) << bit;
          continue;
        }
        try {
          read();
          ADD_FAILURE() << bit;
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), testing::HasSubstr("bits of no number of the weight"));
          EXPECT_THAT(error.what(),
                      testing::HasSubstr("byte " + std::to_string(100 + bit / 32 * 4) + ":"));
        }
      }
    }
  }
}

TEST(PartStrings, RefusesWhatHasNoSuchTensor) {
  const PartForm codes = codes_of(3, true), zeros = zeros_of(3, true);
  const Bytes bytes(6, std::byte{4});
  EXPECT_THROW(tensor_of_part(zeros, bytes, {6, 1}), Error) << "4 has no code of three bits";
  EXPECT_THROW(tensor_of_part(codes, bytes, {1, 9}), Error) << "another size";
  EXPECT_THROW(part_of_tensor(codes, {{"f", "t", 0}, bytes}, {1, 6}, Dtype::bf16), Error);
  for (PartForm bad : {codes, zeros}) {
    bad.word = 16;
    EXPECT_FALSE(is_legal(bad));
    bad.word = 32, bad.transposed = true;
    EXPECT_FALSE(is_legal(bad));
  }
  PartForm bad = codes;
  bad.bias = 1;
  EXPECT_FALSE(is_legal(bad));
  bad = zeros, bad.bias = 8;
  EXPECT_FALSE(is_legal(bad));
  EXPECT_FALSE(is_legal({.in_file = 4, .in_part = 4, .word = 32, .string = true}));
  bad = kPlanes, bad.span = 190;
  EXPECT_FALSE(is_legal(bad));
}

}  // namespace
}  // namespace stowage::test
