// SPDX-License-Identifier: Apache-2.0
// The same products of codes of a byte in groups of 16 or 32, where there is VNNI: fp32 sums would
// wait for their scales; and in any groups by NEON. Digits are codes + 128, where they must not be
// negative.
//
// A register of codes is a block of 32 columns, 64, or 16; of a lane of 32 bits are four columns. x
// is arranged as columns lie: high bytes, low ones, then, for each four columns, sum X and 2^e.
#pragma once
#include "kernel/cpu/linear_bytes-inl.h"

namespace stowage {
namespace {

constexpr std::int64_t kWholeBlock = 4 * kWidth;  // columns of a register of digits

struct WholeBlockOfX {
  std::int8_t high[kWholeBlock], low[kWholeBlock];
  std::int32_t sums[kWidth];
  float powers[kWidth];
};
static_assert(sizeof(WholeBlockOfX) == kWholeBlock * kBytesOfX[kForBytes]);

inline bool arrange_eight(Floats x, std::int64_t at, WholeBlockOfX& block) {
  Numbers numbers;
  float power = 1;
  if (!fix_eight(x, numbers, power)) return false;
  const Numbers high = high_of(numbers);
  put_bytes(high, block.high + at, block.high + at + 4);
  put_bytes(low_of(numbers, high), block.low + at, block.low + at + 4);
  std::int32_t each[kNeighbors];
  store_as(each, numbers);
  for (int four = 0; four < 2; ++four) {
    const std::int32_t* of = each + 4 * four;
    block.sums[at / 4 + four] = of[0] + of[1] + of[2] + of[3];
    block.powers[at / 4 + four] = power;
  }
  return true;
}

/// Digits of a block, of how many bits codes are, and how much more than these digits are.
struct ByteReader {
  static constexpr int bits = 8;
  static constexpr int more() { return kMoreThanSigned; }
  explicit ByteReader(const BytesDotTask& /*task*/) {}
  Bytes read(const std::uint8_t* codes) const {
    return load_as<Bytes>(codes) ^ spread_byte(kMoreThanSigned);
  }
};

template <class Reader, class SomeScales>
struct WholeWay {
  using Block = WholeBlockOfX;
  using Scales = SomeScales;
  static constexpr std::int64_t kColumns = kWholeBlock;
  static constexpr int kGroups = Scales::kGroups;
  static constexpr float kUnit = 1;
  Reader reader;
  Scales scales;
  explicit WholeWay(const BytesDotTask& task) : reader(task), scales(task) {}
  int bits() const { return reader.bits; }

  template <bool kWhole, int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) {
    Bytes digits[kRows];
    for (int r = 0; r < kRows; ++r) digits[r] = reader.read(at.codes[r]);
    for (int j = 0; j < kM; ++j) {
      const auto& x = at.template block_of_x<WholeBlockOfX>(j);
      const RestOfX rest(x, -reader.more());
      F exact[kRows];
      for (int r = 0; r < kRows; ++r) {
        const Bytes high = add_fours(Bytes{}, digits[r], load_as<Bytes>(x.high));
        const Bytes low = add_fours(rest.times, digits[r], load_as<Bytes>(x.low));
        exact[r] = to_floats(add_lanes(left_in_lanes<8>(high), low));
      }
      for (int r = 0; r < kRows; ++r) scales.template add<true>(at, r, exact[r], rest, sums[r][j]);
    }
    scales.end_block();
  }
};

/// kLong: whether groups may be longer than a block.
template <class Reader, Zero kZero, int kMost, int kTogether, bool kLong>
void whole_groups(const BytesDotTask& task) {
  const auto rows = [&]<int kGroups>() {
    add_rows<WholeWay<Reader, ScalesOfRun<kZero, kGroups>>, kMost, kTogether>(task);
  };
  if (task.run.group == 16) return rows.template operator()<kWholeBlock / 16>();
  if (task.run.group == 32) return rows.template operator()<kWholeBlock / 32>();
  if constexpr (kLong) rows.template operator()<kSeveralBlocks>();
}

inline void int8_dot(const BytesDotTask& task) noexcept {
  if (task.run.zeros != nullptr)
    return whole_groups<ByteReader, Zero::code, 2, kTogetherInBytes, kWholeInLong>(task);
  whole_groups<ByteReader, Zero::none, 2, kTogetherInBytes, kWholeInLong>(task);
}

constexpr BytesKernels all_bytes_kernels() {
  BytesKernels kernels = bytes_kernels();
  kernels.arrange[kForBytes][2] = &arrange_bytes<Dtype::bf16, WholeBlockOfX, kWholeBlock>;
  kernels.arrange[kForBytes][3] = &arrange_bytes<Dtype::f16, WholeBlockOfX, kWholeBlock>;
  kernels.set(Codes::int8, &int8_dot, kForBytes);
  kernels.whole_in_long = kWholeInLong;
  return kernels;
}

}  // namespace
}  // namespace stowage
