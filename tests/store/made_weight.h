// SPDX-License-Identifier: Apache-2.0
// A weight whose parts hold some bytes: the store moves bytes and never asks what they mean.
#pragma once
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "stowage/weight.h"

namespace stowage::test {

inline Weight made_weight(const Storage& storage, const Shape& shape) {
  using Bytes = std::vector<std::byte>;
  auto owner = std::make_shared<std::array<Bytes, kMaxParts>>();
  const Layout made = layout(storage, shape);
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(made.count); ++i) {
    Bytes& bytes = (*owner)[i];
    bytes.resize(static_cast<std::size_t>(made.parts[i].bytes));
    for (std::size_t k = 0; k < bytes.size(); ++k) bytes[k] = std::byte(k * 7 + i * 31 + 1);
    const float offset = 0.57466602F;  // a number whose text needs every digit
    if (made.parts[i].name == "nested_offset") std::memcpy(bytes.data(), &offset, sizeof offset);
    parts[i] = bytes.data();
  }
  return Weight(storage, shape, std::span(parts).first(static_cast<std::size_t>(made.count)),
                std::move(owner));
}

}  // namespace stowage::test
