// SPDX-License-Identifier: Apache-2.0
// The records that superblocks of ggml have: 256 neighbours of a row, in sub-blocks whose scales
// count an f16 number. reference_ggml.cpp draws them. A type for each says how many sub-blocks
// there are, how large a record is, what a count reaches, what a scale divides by, and reads and
// writes records; who walks superblocks is made for each of them.
#pragma once
#include <cstdint>
#include <cstring>

#include "format/convert.h"

namespace stowage::superblocks {
namespace {  // a copy for each instruction set

inline constexpr std::int64_t kBlock = 256;

template <std::int64_t kSteps>
struct Steps {  // of sub-blocks, as fp32 numbers
  float scale[kSteps], offset[kSteps];
};
/// What a record says: what one of its scales and of its offsets counts for, as f16 numbers, and
/// the counts, those of scales first.
template <std::int64_t kCounts>
struct Counted {
  std::uint16_t scale, offset;
  std::int8_t counts[kCounts];
};

[[maybe_unused]] inline std::uint16_t half(const std::uint8_t* record, std::int64_t at) noexcept {
  std::uint16_t made;
  std::memcpy(&made, record + at, sizeof made);
  return made;
}

/// Scales and offsets of six bits, each under a number of its own.
struct Q4K {
  static constexpr std::int64_t kInner = 32, kSteps = kBlock / kInner, kRecord = 16;
  static constexpr bool kOffsets = true;
  static constexpr float kMostCount = 63;

  // A byte for each of four sub-blocks.
  static std::uint32_t word(const std::uint8_t* record, int at) noexcept {
    std::uint32_t made;
    std::memcpy(&made, record + at, sizeof made);
    return made;
  }
  static Counted<2 * kSteps> counted(const std::uint8_t* record) noexcept {
    const std::uint32_t a = word(record, 4), b = word(record, 8), c = word(record, 12);
    const auto eight = [](std::uint32_t first, std::uint32_t last) {
      return first | std::uint64_t{last} << 32;
    };
    const std::uint64_t words[2] = {
        eight(a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)),       // of scales
        eight(b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)),  // of offsets
    };
    Counted<2 * kSteps> made{half(record, 0), half(record, 2), {}};
    std::memcpy(made.counts, words, sizeof words);
    return made;
  }
  static void put(std::uint8_t* record, std::uint16_t d, std::uint16_t e,
                  const std::uint8_t (&scales)[kSteps],
                  const std::uint8_t (&offsets)[kSteps]) noexcept {
    const std::uint32_t s[2] = {word(scales, 0), word(scales, 4)};
    const std::uint32_t m[2] = {word(offsets, 0), word(offsets, 4)};
    const std::uint32_t words[4] = {
        d | static_cast<std::uint32_t>(e) << 16,
        s[0] | (s[1] & 0x30303030u) << 2,
        m[0] | (m[1] & 0x30303030u) << 2,
        (s[1] & 0x0f0f0f0fu) | (m[1] & 0x0f0f0f0fu) << 4,
    };
    std::memcpy(record, words, sizeof words);
  }
};

/// Scales of eight bits, then the number that they count.
struct Q6K {
  static constexpr std::int64_t kInner = 16, kSteps = kBlock / kInner, kRecord = 18;
  static constexpr bool kOffsets = false;
  static constexpr float kMostCount = 127;

  static Counted<kSteps> counted(const std::uint8_t* record) noexcept {
    Counted<kSteps> made{half(record, kSteps), 0, {}};
    std::memcpy(made.counts, record, sizeof made.counts);
    return made;
  }
  static void put(std::uint8_t* record, std::uint16_t d, std::uint16_t /*e*/,
                  const std::uint8_t (&scales)[kSteps],
                  const std::uint8_t (&/*offsets*/)[kSteps]) noexcept {
    std::memcpy(record, scales, sizeof scales);
    std::memcpy(record + kSteps, &d, sizeof d);
  }
};

template <class Super>
Steps<Super::kSteps> steps_of(const std::uint8_t* record) noexcept {
  const auto said = Super::counted(record);
  const float scale = f16_to_f32(said.scale), offset = f16_to_f32(said.offset);
  Steps<Super::kSteps> made{};
  for (std::int64_t j = 0; j < Super::kSteps; ++j) {
    made.scale[j] = scale * static_cast<float>(said.counts[j]);
    if constexpr (Super::kOffsets)
      made.offset[j] = offset * static_cast<float>(said.counts[Super::kSteps + j]);
  }
  return made;
}

}  // namespace
}  // namespace stowage::superblocks
