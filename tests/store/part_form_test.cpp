// SPDX-License-Identifier: Apache-2.0
// Parts of weights in the forms of dialects: each number where the drawings of the dialects have
// it, both ways, and nothing else in the tensor.
#include "store/part_form.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "store/part_drawings.h"
#include "stowage/error.h"

namespace stowage::test {
namespace {

using Axis = PartForm::Axis;

constexpr PartForm kHalves{
    .in_file = 4, .in_part = 4, .word = 8, .order = {1, 0, 2, 3, 4, 5, 6, 7}};
constexpr PartForm kRagged{.in_file = 4, .in_part = 4, .word = 32};
constexpr PartForm kBytesInWords{.in_file = 8, .in_part = 8, .word = 32, .bias = 128};
constexpr PartForm kUnpacked{.in_file = 8, .in_part = 4, .word = 8, .bias = 248};
constexpr PartForm kSigned{.in_file = 4, .in_part = 4, .word = 8, .bias = 8};
constexpr PartForm kFolded{.in_file = 4,
                           .in_part = 4,
                           .word = 8,
                           .axis = Axis::rows,
                           .order = {1, 0, 2, 3, 4, 5, 6, 7},
                           .folded = true};
constexpr PartForm kTurned{.in_file = 16, .in_part = 16, .word = 16, .transposed = true};
constexpr PartForm kZerosDown{
    .in_file = 4, .in_part = 8, .word = 32, .axis = Axis::rows, .bias = 8};
constexpr PartForm kLessOne{.in_file = 4,
                            .in_part = 8,
                            .word = 32,
                            .axis = Axis::rows,
                            .transposed = true,
                            .bias = 8,
                            .less = 1};
constexpr PartForm kQ40Codes{
    .in_file = 4, .in_part = 4, .word = 8, .record = 18, .at = 2, .span = 16, .halves = 32};
constexpr PartForm kQ40Scales{.in_file = 16, .in_part = 16, .word = 16, .record = 18, .span = 2};
constexpr PartForm kNvfp4Codes{
    .in_file = 4, .in_part = 4, .word = 8, .record = 36, .at = 4, .span = 32, .halves = 16};
constexpr PartForm kNvfp4Scales{
    .in_file = 8, .in_part = 8, .word = 8, .record = 36, .span = 4, .most = 0x7e};

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
  // torchao: byte j is column j, q of -8 to 7, which rests as q + 8.
  check(kUnpacked, {7, 50}, 350, [](std::int64_t r, std::int64_t c) { return 8 * (r * 50 + c); });
  // And two such in a byte, the first in the low half.
  check(kSigned, {7, 50}, 175, [](std::int64_t r, std::int64_t c) { return 4 * (r * 50 + c); });
  // hqq: of n rows of the grouped matrix, [7..4: row i | 3..0: row i + n / 2].
  check(kFolded, {6, 50}, 150,
        [](std::int64_t r, std::int64_t c) { return 8 * (r % 3 * 50 + c) + (r < 3 ? 4 : 0); });
  check(kFolded, {3, 50}, 75, [](std::int64_t r, std::int64_t c) {  // the middle is in a row
    const std::int64_t at = r * 50 + c;
    return 8 * (at % 75) + (at < 75 ? 4 : 0);
  });
  check(kTurned, {40, 33}, 2640, [](std::int64_t r, std::int64_t c) { return 16 * (c * 40 + r); });
  // GPTQ, word r of column o: bits 4j to 4j + 3 are q[8r + j, o]; v1 has z - 1 of o = 8c + j.
  check(kTurnedWords, {40, 64}, 1280,
        [](std::int64_t o, std::int64_t k) { return 32 * (k / 8 * 40 + o) + k % 8 * 4; });
  check(kTurnedWords, {70, 392}, 70 * 196,
        [](std::int64_t o, std::int64_t k) { return 32 * (k / 8 * 70 + o) + k % 8 * 4; });
  check(kLessOne, {40, 3}, 60,
        [](std::int64_t o, std::int64_t g) { return 32 * (g * 5 + o / 8) + o % 8 * 4; });
  check(kLessOne, {44, 19}, 456,
        [](std::int64_t o, std::int64_t g) { return 32 * (g * 6 + o / 8) + o % 8 * 4; });
  // compressed-tensors: down a column.
  check(kZerosDown, {21, 5}, 60,
        [](std::int64_t o, std::int64_t g) { return 32 * (o / 8 * 5 + g) + o % 8 * 4; });
  // GGUF, a block of 32: byte j of its codes has element j low and j + 16 high.
  check(kQ40Codes, {5, 96}, 270, [](std::int64_t r, std::int64_t c) {
    return 8 * ((r * 3 + c / 32) * 18 + 2 + c % 16) + (c % 32 < 16 ? 0 : 4);
  });
  check(kQ40Scales, {5, 3}, 270,
        [](std::int64_t r, std::int64_t b) { return 8 * (r * 3 + b) * 18; });
  // GGUF's NVFP4, a block of 64: four scales, then 4 times 8 bytes of 16 elements each.
  check(kNvfp4Codes, {3, 128}, 216, [](std::int64_t r, std::int64_t c) {
    return 8 * ((r * 2 + c / 64) * 36 + 4 + c % 64 / 16 * 8 + c % 8) + (c % 16 < 8 ? 0 : 4);
  });
}

// Blocks of codes, of scales, or of both.
PartForm some_block(std::mt19937& random) {
  PartForm form;
  const auto bits = static_cast<std::uint8_t>(4 << random() % 3);
  form.in_file = form.in_part = bits;
  form.word = std::max<std::uint8_t>(bits, 8);
  if (bits == 4 && random() % 2 == 0) form.halves = static_cast<std::uint8_t>(16 << random() % 3);
  if (form.halves != 0 && random() % 2 == 0) return form;
  form.span = static_cast<std::uint8_t>(form.halves != 0 ? form.halves / 2 << random() % 2
                                                         : form.word / 8 << random() % 5);
  form.at = static_cast<std::uint8_t>(random() % 9);
  form.record = static_cast<std::uint8_t>(form.at + form.span + random() % 9);
  return form;
}

// One that fills the blocks of the form, where it has any.
Size filling(const PartForm& form, const Size& size) {
  if (form.record == 0 && form.halves == 0) return size;
  constexpr std::int64_t kBoth = 128;  // numbers, of which all spans and halves are parts
  return {size.rows, (size.columns + kBoth - 1) / kBoth * kBoth};
}

PartForm some_form(std::mt19937& random) {
  if (random() % 4 == 0) return some_block(random);
  const auto one_of = [&](std::initializer_list<int> all) {
    return static_cast<std::uint8_t>(all.begin()[random() % all.size()]);
  };
  PartForm form;
  do {
    form = {
        .in_file = one_of({4, 8, 16}), .in_part = one_of({4, 8, 16}), .word = one_of({8, 16, 32})};
    form.axis = static_cast<Axis>(random() % 2);
    form.transposed = random() % 2 == 0, form.tiled = random() % 4 == 0;
    form.folded = random() % 4 == 0;
    if (random() % 2 == 0) form.bias = one_of({1, 8, 128, 248});
    if (random() % 2 == 0 && form.in_file == 4 && form.word == 32) form.less = one_of({1, 5});
    if (random() % 2 == 0 && form.in_file != 0 && form.word >= form.in_file)
      std::shuffle(form.order.begin(), form.order.begin() + form.word / form.in_file, random);
  } while (!is_legal(form));
  return form;
}

// The same as drawings, for any form.
Drawing drawing_of(const PartForm& form, const Size& size) {
  const std::int64_t width = tensor_shape(form, part_shape(form, size))[1];
  if (form.record != 0 || form.halves != 0)
    return [=](std::int64_t row, std::int64_t column) {
      std::int64_t bit = (row * size.columns + column) * form.in_file;
      if (form.halves != 0) {
        const std::int64_t in_run = column % form.halves, half = form.halves / 2;
        bit += (in_run % half * 2 + in_run / half - in_run) * 4;
      }
      if (form.record == 0) return bit;
      const std::int64_t span = 8 * form.span;
      return 8 * (bit / span * form.record + form.at) + bit % span;
    };
  return [=](std::int64_t row, std::int64_t column) {
    const int run = form.word / form.in_file;
    if (form.folded) {
      const std::int64_t at = row * size.columns + column, each = size.rows * size.columns / run;
      row = at / each, column = at % each;
    }
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
    const unsigned most = trial % 10 == 0 ? 400 : 40;
    Size size{1 + static_cast<std::int64_t>(random() % (most + 30)),
              2 * (1 + static_cast<std::int64_t>(random() % most))};
    if (random() % 2 == 0) size = {size.rows / 8 * 8, size.columns / 8 * 8};
    size = filling(form, size);
    SCOPED_TRACE(testing::Message()
                 << form_key(form) << " of " << size.rows << " " << size.columns);
    const Shape shape = part_shape(form, size);
    const bool is_block = form.record != 0 || form.halves != 0;
    const auto bytes = static_cast<std::size_t>(tensor_shape(form, shape).elements()) *
                       (is_block ? 8 : form.word) / 8;
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
    if (form.record != 0) continue;                  // what is beside a part there is of another
    if (form.in_part < form.in_file) form.bias = 0;  // numbers that end between powers of two
    const Size size = filling(form, {1 + static_cast<std::int64_t>(random() % 30),
                                     2 * (1 + static_cast<std::int64_t>(random() % 12))});
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

TEST(PartForm, PartsShareRecords) {
  std::mt19937 random(4);
  const Size size{7, 96}, groups{7, 3};
  const Bytes codes = some_part(kQ40Codes, size, random);
  const Bytes scales = some_part(kQ40Scales, groups, random);
  const Shape codes_shape = part_shape(kQ40Codes, size), scales_shape{7, 3};
  Bytes both = tensor_of_part(kQ40Codes, codes, codes_shape);
  const Bytes other = tensor_of_part(kQ40Scales, scales, scales_shape);
  ASSERT_EQ(both.size(), other.size());
  for (std::size_t i = 0; i < both.size(); ++i) {
    EXPECT_TRUE(both[i] == std::byte{0} || other[i] == std::byte{0}) << i;
    both[i] |= other[i];
  }
  EXPECT_EQ(part_of_tensor(kQ40Codes, {{"f", "t", 0}, both}, codes_shape, Dtype::bf16), codes);
  EXPECT_EQ(part_of_tensor(kQ40Scales, {{"f", "t", 0}, both}, scales_shape, Dtype::bf16), scales);
  // And are formed together, while the records are read once.
  Bytes made_codes(codes.size()), made_scales(scales.size());
  const std::array<PartPlace, 2> places{
      {{&kQ40Codes, codes_shape, made_codes}, {&kQ40Scales, scales_shape, made_scales}}};
  std::size_t read = 0;
  form_parts(
      places, {"f", "t", 0}, both.size(), Dtype::bf16,
      [&](std::uint64_t offset, std::span<std::byte> bytes) {
        read += bytes.size();
        std::copy_n(both.begin() + static_cast<std::ptrdiff_t>(offset), bytes.size(),
                    bytes.begin());
      },
      100);
  EXPECT_EQ(made_codes, codes);
  EXPECT_EQ(made_scales, scales);
  EXPECT_EQ(read, both.size());
}

TEST(PartForm, HasNoNumberBeyondTheMost) {
  Bytes part(16, std::byte{0x7e});
  Bytes tensor = tensor_of_part(kNvfp4Scales, part, {2, 8});
  EXPECT_EQ(part_of_tensor(kNvfp4Scales, {{"f", "t", 0}, tensor}, {2, 8}, Dtype::bf16), part);
  part[9] = std::byte{0x7f};
  tensor[36 * 2 + 1] = std::byte{0x7f};
  EXPECT_THROW(tensor_of_part(kNvfp4Scales, part, {2, 8}), Error);
  try {
    part_of_tensor(kNvfp4Scales, {{"f", "t", 100}, tensor}, {2, 8}, Dtype::bf16);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("byte 173:"));
    EXPECT_THAT(error.what(), testing::HasSubstr("127 for at most 126"));
  }
}

// Every byte, among others that fit: one that four bits cannot say is refused, at its place.
TEST(PartForm, HasNoCodeThatIsTooWide) {
  const Shape shape{2, 16};
  for (const std::size_t at : {0, 1, 30, 63}) {
    for (int code = -128; code < 128; ++code) {
      Bytes tensor(64, std::byte{0xfd});
      tensor[at] = static_cast<std::byte>(code);
      const auto read = [&] {
        return part_of_tensor(kUnpacked, {{"f", "t", 100}, tensor}, shape, Dtype::bf16);
      };
      if (code >= -8 && code < 8) {
        Bytes part(32, std::byte{0x55});
        const int low = at % 2 == 0 ? code + 8 : 5, high = at % 2 == 0 ? 5 : code + 8;
        part[at / 2] = static_cast<std::byte>(low | high << 4);
        EXPECT_EQ(read(), part) << code;
        EXPECT_EQ(tensor_of_part(kUnpacked, part, shape), tensor) << code;
        continue;
      }
      try {
        read();
        ADD_FAILURE() << code << " at " << at;
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(), ("f: tensor 't': byte " + std::to_string(100 + at) +
                                    ": a tensor must be as its dialect says, got " +
                                    std::to_string(code) + " for a number of 4 bits [dialect_part]")
                                       .c_str());
      }
    }
  }
}

TEST(PartForm, IsANumberThatNoTensorHas) {
  const float one = 1, other = 1.5;
  const auto bytes_of = [](const float& x) { return std::as_bytes(std::span(&x, 1)); };
  const Bytes made = part_of_tensor({.one = true}, {{"f", "t", 0}, {}}, {}, Dtype::bf16);
  EXPECT_TRUE(std::ranges::equal(made, bytes_of(one)));
  EXPECT_TRUE(tensor_of_part({.one = true}, bytes_of(one), {}).empty());
  EXPECT_THROW(tensor_of_part({.one = true}, bytes_of(other), {}), Error);
  EXPECT_EQ(form_from_key(form_key({.one = true})), PartForm{.one = true});
}

TEST(PartForm, RefusesWhatFillsNoBlocks) {
  const Bytes bytes(18);
  EXPECT_THROW(tensor_of_part(kQ40Codes, std::span(bytes).first(8), {1, 8}), Error);
  EXPECT_THROW(tensor_of_part(kQ40Codes, bytes, {1, 16}), Error) << "another size";
  EXPECT_THROW(part_of_tensor(kQ40Codes, {{"f", "t", 0}, bytes}, {1, 8}, Dtype::bf16), Error);
  EXPECT_THROW(part_of_tensor(kQ40Codes, {{"f", "t", 0}, bytes}, {2, 16}, Dtype::bf16), Error);
}

// A hostile file may have any number of rows without columns.
TEST(PartForm, TakesNoTimeForRowsOfNothing) {
  constexpr std::int64_t kMany = std::int64_t{1} << 62;
  for (const PartForm& form :
       {kTiles, kHalves, kTurned, kZerosDown, kAwq, kUnpacked, kFolded, kQ40Codes}) {
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
  for (const int at : {0, 9, 170, 255}) {  // among many
    for (const int number : {8, -9, 127, -128}) {
      Bytes many(256, std::byte{7});
      many[static_cast<std::size_t>(at)] = static_cast<std::byte>(number);
      try {
        tensor_of_part(kLessOne, many, {16, 16});
        ADD_FAILURE() << number << " at " << at;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("number " + std::to_string(at) + " of"));
        EXPECT_THAT(error.what(), testing::EndsWith(", got " + std::to_string(number)));
      }
    }
  }
}

TEST(PartForm, HasAKey) {
  EXPECT_EQ(form_key({}), 0);
  EXPECT_EQ(form_from_key(0), PartForm{});
  EXPECT_EQ(form_key({.rounded = true}), 1);
  EXPECT_EQ(form_from_key(1), PartForm{.rounded = true});
  const std::int64_t key = form_key(kAwq);
  for (const std::int64_t bad :
       {std::int64_t{2}, std::int64_t{-1}, key + 1, key | std::int64_t{1} << 62,
        key ^ std::int64_t{1} << 38, form_key(kTurned) | std::int64_t{1} << 22, key | 1 << 6,
        form_key({.in_file = 8, .in_part = 8, .word = 8, .record = 34, .at = 3, .span = 32}),
        form_key({.in_file = 8, .in_part = 8, .word = 8, .halves = 16}),
        form_key({.in_file = 4, .in_part = 4, .word = 8, .halves = 8}),
        form_key(kQ40Codes) | std::int64_t{1} << 54})
    EXPECT_THROW(form_from_key(bad), Error) << bad;
}

}  // namespace
}  // namespace stowage::test
