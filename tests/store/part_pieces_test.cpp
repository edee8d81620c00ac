// SPDX-License-Identifier: Apache-2.0
// Parts that are formed piece by piece; part_form_test.cpp has their bits.
#include "store/part_pieces.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <vector>

#include "stowage/error.h"

namespace stowage::test {
namespace {

TEST(PartPieces, NameTheByte) {
  const PartForm form{.in_file = 8, .in_part = 8, .word = 32, .bias = 128};
  std::vector<std::byte> tensor(600 * 4, std::byte{0x80});
  const Shape narrow{600, 3};  // of four numbers in a word
  for (std::size_t i = 3; i < tensor.size(); i += 4) tensor[i] = std::byte{0};
  tensor[4 * 599 + 3] = std::byte{1};
  std::vector<std::byte> made(600 * 3);
  const PartPlace place{&form, narrow, made};
  const auto read = [&](std::uint64_t offset, std::span<std::byte> bytes) {
    std::copy_n(tensor.begin() + static_cast<std::ptrdiff_t>(offset), bytes.size(), bytes.begin());
  };
  try {
    form_parts({&place, 1}, {"f", "t", 1000}, tensor.size(), Dtype::bf16, read, 64);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("byte " + std::to_string(1000 + 4 * 599 + 3)));
  }
}

TEST(PartPieces, AreAsLargeAsTheyWereAskedFor) {
  const PartForm form{.in_file = 4, .in_part = 4, .word = 32, .transposed = true};
  const Shape part{24, 4 * 256};  // 256 rows of 24 words, of which lines of a part have 64
  std::vector<std::byte> tensor(256 * 24 * 4), made(tensor.size());
  const PartPlace place{&form, part, made};
  std::vector<std::size_t> pieces;
  const auto read = [&](std::uint64_t, std::span<std::byte> bytes) {
    std::ranges::fill(bytes, std::byte{});
    pieces.push_back(bytes.size());
  };
  form_parts({&place, 1}, {"f", "t", 0}, tensor.size(), Dtype::bf16, read, 1);
  EXPECT_THAT(pieces, testing::ElementsAre(6144, 6144, 6144, 6144));
  pieces.clear();
  form_parts({&place, 1}, {"f", "t", 0}, tensor.size(), Dtype::bf16, read);
  EXPECT_THAT(pieces, testing::ElementsAre(tensor.size()));
}

// Of tensors that are so wide that several lines of each row of the part would be much memory.
TEST(PartPieces, HaveALineOfEachRowWhereTheyAreWide) {
  const PartForm form{.in_file = 4, .in_part = 4, .word = 32, .transposed = true};
  const Shape part{40000, 4 * 64};  // 64 rows of 160 KB
  std::vector<std::byte> tensor(64 * 40000 * 4), made(tensor.size());
  const PartPlace place{&form, part, made};
  std::vector<std::size_t> pieces;
  const auto read = [&](std::uint64_t, std::span<std::byte> bytes) {
    std::ranges::fill(bytes, std::byte{});
    pieces.push_back(bytes.size());
  };
  form_parts({&place, 1}, {"f", "t", 0}, tensor.size(), Dtype::bf16, read);
  EXPECT_THAT(pieces, testing::ElementsAre(2560000, 2560000, 2560000, 2560000));
}

}  // namespace
}  // namespace stowage::test
