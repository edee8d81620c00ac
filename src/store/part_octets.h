// SPDX-License-Identifier: Apache-2.0
// Codes of four bits, eight by eight: the fast ways of forms of parts.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace stowage::octets {

inline constexpr std::int64_t kOctet = 8;  // codes of four bits in 32
using Octets = std::array<std::uint32_t, kOctet>;
// The transpose of 8 times 8 codes: quarters change places, then theirs, then theirs. A word may
// be a vector of those of several octets.
template <class Word>
void turn(std::array<Word, kOctet>& words) {
  constexpr std::array<std::uint32_t, 3> kLow{0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
  for (int level = 2; level >= 0; --level) {
    const std::size_t half = std::size_t{1} << level;
    const int shift = 4 << level;
    for (std::size_t k = 0; k < words.size(); ++k) {
      if ((k & half) != 0) continue;
      const Word other =
          (words[k] >> shift ^ words[k + half]) & kLow[static_cast<std::size_t>(level)];
      words[k + half] ^= other;
      words[k] ^= other << shift;
    }
  }
}
inline constexpr std::uint64_t kEachByte = 0x0101010101010101;
// Codes of four bits to numbers of bytes, and back: anything above 15 to more than 32 bits.
inline std::uint64_t spread(std::uint64_t codes, std::uint64_t bias) {
  codes = (codes | codes << 16) & 0x0000ffff0000ffff;
  codes = (codes | codes << 8) & 0x00ff00ff00ff00ff;
  codes = (codes | codes << 4) & 0x0f * kEachByte;
  return (codes + 0x80 * kEachByte - bias * kEachByte) ^ 0x80 * kEachByte;
}
inline std::uint64_t joined(std::uint64_t numbers, std::uint64_t bias) {
  const std::uint64_t signs = numbers & 0x80 * kEachByte;
  const std::uint64_t codes = ((numbers ^ signs) + bias * kEachByte) ^ signs;
  if ((codes & 0xf0 * kEachByte) != 0) return ~std::uint64_t{0};
  const std::uint64_t pairs = (codes | codes >> 4) & 0x00ff00ff00ff00ff;
  const std::uint64_t quads = (pairs | pairs >> 8) & 0x0000ffff0000ffff;
  return (quads | quads >> 16) & 0xffffffff;
}

}  // namespace stowage::octets
