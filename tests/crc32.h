// SPDX-License-Identifier: Apache-2.0
// CRC-32 as zlib computes it, bit by bit: the published golden values are in it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace stowage::test {

inline std::uint32_t crc32(const void* data, std::size_t size) {
  std::uint32_t crc = ~0u;
  for (std::size_t i = 0; i < size; ++i) {
    crc ^= static_cast<const std::uint8_t*>(data)[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1u) != 0 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

}  // namespace stowage::test
