// SPDX-License-Identifier: Apache-2.0
// The record that a superblock of ggml's Q4_K has: 256 neighbours of a row, in sub-blocks of 32
// with a scale and an offset, each six bits that count an f16 number. reference_ggml.cpp draws it.
// `static` as in convert.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "format/convert.h"

namespace stowage::q4_k {

inline constexpr std::int64_t kBlock = 256, kInner = 32, kSteps = kBlock / kInner, kRecord = 16;

struct Steps {  // of its sub-blocks, as fp32 numbers
  float scale[kSteps], offset[kSteps];
};

// Six-bit numbers of all sub-blocks, a byte each: of scales, or of offsets.
struct Counts {
  std::uint32_t first, last;  // of sub-blocks 0 to 3, and 4 to 7

  std::uint32_t operator[](std::int64_t j) const noexcept {
    return (j < 4 ? first : last) >> (j % 4 * 8) & 63u;
  }
};

[[maybe_unused]] static inline std::uint32_t word(const std::uint8_t* record, int at) noexcept {
  std::uint32_t made;
  std::memcpy(&made, record + at, sizeof made);
  return made;
}
[[maybe_unused]] static inline float half(const std::uint8_t* record, int at) noexcept {
  std::uint16_t made;
  std::memcpy(&made, record + at, sizeof made);
  return f16_to_f32(made);
}

// What a record says: numbers of sub-blocks, and what one of either counts for.
struct Counted {
  Counts scales, offsets;
  float scale, offset;
};

[[maybe_unused]] static inline Counted counted(const std::uint8_t* record) noexcept {
  const std::uint32_t a = word(record, 4), b = word(record, 8), c = word(record, 12);
  return {{a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)},
          {b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)},
          half(record, 0),
          half(record, 2)};
}

[[maybe_unused]] static inline Steps steps_of(const std::uint8_t* record) noexcept {
  const Counted said = counted(record);
  Steps made;
  for (std::int64_t j = 0; j < kSteps; ++j) {
    made.scale[j] = said.scale * static_cast<float>(said.scales[j]);
    made.offset[j] = said.offset * static_cast<float>(said.offsets[j]);
  }
  return made;
}

/// Writes the record of these f16 numbers and counts.
[[maybe_unused]] static inline void put(std::uint8_t* record, std::uint16_t d, std::uint16_t e,
                                        const Counts& scales, const Counts& offsets) noexcept {
  const std::uint32_t words[4] = {
      d | static_cast<std::uint32_t>(e) << 16,
      scales.first | (scales.last & 0x30303030u) << 2,
      offsets.first | (offsets.last & 0x30303030u) << 2,
      (scales.last & 0x0f0f0f0fu) | (offsets.last & 0x0f0f0f0fu) << 4,
  };
  std::memcpy(record, words, sizeof words);
}

}  // namespace stowage::q4_k
