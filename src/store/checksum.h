// SPDX-License-Identifier: Apache-2.0
// XXH3-64 over bytes that come in pieces.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace stowage {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  void add(std::span<const std::byte> bytes) noexcept;
  std::uint64_t value() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// XXH3-64 of all bytes at once.
std::uint64_t checksum_of(std::span<const std::byte> bytes) noexcept;

}  // namespace stowage
