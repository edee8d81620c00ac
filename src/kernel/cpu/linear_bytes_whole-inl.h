// SPDX-License-Identifier: Apache-2.0
// The same products of codes of a byte in groups of 16 or 32, where there is VNNI: fp32 sums would
// wait for their scales. Digits are codes + 128.
//
// A load of 32 bytes is half a block; of a lane of 32 bits are four columns. x is arranged as
// columns lie: high bytes, low ones, then, for each four columns, sum X and 2^e.
#pragma once
#include "kernel/cpu/linear_bytes-inl.h"

namespace stowage {
namespace {

struct WholeBlockOfX {
  std::int8_t high[2][kBytesBlock / 2], low[2][kBytesBlock / 2];  // of each half
  float sums[2][kWidth], powers[2][kWidth];
};
static_assert(sizeof(WholeBlockOfX) == kBytesBlock * kBytesOfX[kForBytes]);

inline bool arrange_eight(F x, std::int64_t at, WholeBlockOfX& block) {
  const std::int64_t half = at / (kBytesBlock / 2), place = at % (kBytesBlock / 2);
  I numbers;
  float power = 1;
  if (!fix_eight(x, numbers, power)) return false;
  const I high = (numbers + 128) >> 8;
  std::int32_t each[kNeighbors];
  store_as(each, numbers);
  Lanes::store_u8(block.high[half] + place, high);
  Lanes::store_u8(block.low[half] + place, numbers - (high << 8));
  for (int four = 0; four < 2; ++four) {
    const std::int32_t* of = each + 4 * four;
    block.sums[half][place / 4 + four] = static_cast<float>(of[0] + of[1] + of[2] + of[3]);
    block.powers[half][place / 4 + four] = power;
  }
  return true;
}

template <Zero kZero, int kOfHalf>
struct WholeWay {
  using Block = WholeBlockOfX;
  static constexpr int kGroups = 2 * kOfHalf, kBits = 8;
  static constexpr float kUnit = 1;

  template <int kRows, int kM>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& at, F (&sums)[kRows][kM]) const {
    for (int half = 0; half < 2; ++half)
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t g = at.groups[r] + half * kOfHalf;
        const __m256i digits =
            _mm256_xor_si256(load_as<__m256i>(at.codes[r] + half * 32), _mm256_set1_epi8(-128));
        const F scale = spread<kOfHalf>(at.task.run.scales + g);
        F from = splat(128.0f);
        if constexpr (kZero == Zero::code) from += spread<kOfHalf>(at.task.run.zeros + g);
        for (int j = 0; j < kM; ++j) {
          const auto& x = at.template block_of_x<WholeBlockOfX>(j);
          const __m256i high =
              add_fours(_mm256_setzero_si256(), digits, load_as<__m256i>(x.high[half]));
          const __m256i both =
              add_fours(_mm256_slli_epi32(high, 8), digits, load_as<__m256i>(x.low[half]));
          const F exact = _mm256_cvtepi32_ps(both);  // below 2^24
          const F number = _mm256_fnmadd_ps(from, Lanes::load_f32(x.sums[half]), exact);
          sums[r][j] =
              Lanes::multiply_add(number * Lanes::load_f32(x.powers[half]), scale, sums[r][j]);
        }
      }
  }
};

template <Zero kZero>
void whole_groups(const BytesDotTask& task) {
  if (task.run.group == 16) return add_rows<WholeWay<kZero, 2>, 2>(task);
  add_rows<WholeWay<kZero, 1>, 2>(task);
}

inline void whole_dot(const BytesDotTask& task) noexcept {
  if (task.run.zeros != nullptr) return whole_groups<Zero::code>(task);
  whole_groups<Zero::none>(task);
}

constexpr BytesKernels all_bytes_kernels() {
  BytesKernels kernels = bytes_kernels();
  kernels.arrange[kForBytes][2] = &arrange_bytes<Dtype::bf16, WholeBlockOfX>;
  kernels.arrange[kForBytes][3] = &arrange_bytes<Dtype::f16, WholeBlockOfX>;
  kernels.set(Codes::int8, &whole_dot, kForBytes);
  return kernels;
}

}  // namespace
}  // namespace stowage
