// SPDX-License-Identifier: Apache-2.0
// Parts that are large enough for the ways that write lines whole: as the dialects draw them.
#include "store/part_turns.h"

#include <gmock/gmock.h>

#include <array>
#include <random>

#include "store/part_drawings.h"

namespace stowage::test {
namespace {

void check(const PartForm& form, const Size& size, const Drawing& drawing) {
  SCOPED_TRACE(testing::Message() << form_key(form) << " of " << size.rows << " " << size.columns);
  std::mt19937 random(1);
  const Bytes part = some_part(form, size, random);
  const Shape words = tensor_shape(form, part_shape(form, size));
  const auto bytes =
      static_cast<std::size_t>(words.elements()) * (form.record != 0 ? 1u : form.word / 8u);
  expect_both_ways(form, part, size, drawn(form, part, size, bytes, drawing));
}

// Rows of the part that begin with a line and rows that do not; some that lines do not fill.
constexpr auto kWide = {8 * kWordsBeside, 16 * kWordsBeside + 256, 17 * kWordsBeside + 8};

TEST(PartTurns, HaveWordsAsGptqDrawsThem) {
  for (const std::int64_t rows : {16, 70})
    for (const std::int64_t wide : kWide)
      check(kTurnedWords, {rows, wide},
            [=](std::int64_t o, std::int64_t k) { return 32 * (k / 8 * rows + o) + k % 8 * 4; });
}

// Word c: bits 4j to 4j + 3 are column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[j].
TEST(PartTurns, HaveCodesAsAwqDrawsThem) {
  constexpr std::array<int, 8> kSlot{0, 4, 1, 5, 2, 6, 3, 7};
  for (const std::int64_t words : {3, 16, 37})
    for (const std::int64_t wide : {std::int64_t{392}, kCodesBeside, 2 * kCodesBeside + 136})
      check(kAwq, {8 * words, wide}, [=](std::int64_t o, std::int64_t k) {
        return 32 * (k * words + o / 8) + kSlot[static_cast<std::size_t>(o % 8)] * 4;
      });
}

// Tiles of 128 rows by 4 columns, four beside each other, 512 bytes each.
TEST(PartTurns, HaveTilesAsComfyDrawsThem) {
  for (const std::int64_t rows : {127, 256, 300})
    check(kTiles, {rows, 2 * kTilesColumns}, [](std::int64_t r, std::int64_t c) {
      return 8 * ((r / 128 * 8 + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4);
    });
}

TEST(PartTurns, HaveRecordsAsGgufDrawsThem) {
  constexpr PartForm kScales{.in_file = 16, .in_part = 16, .word = 16, .record = 18, .span = 2};
  constexpr PartForm kCodes{
      .in_file = 8, .in_part = 8, .word = 8, .record = 34, .at = 2, .span = 32};
  check(kScales, {40, 33}, [](std::int64_t r, std::int64_t b) { return 8 * (r * 33 + b) * 18; });
  check(kCodes, {5, 96},
        [](std::int64_t r, std::int64_t c) { return 8 * ((r * 3 + c / 32) * 34 + 2 + c % 32); });
}

}  // namespace
}  // namespace stowage::test
