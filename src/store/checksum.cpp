// SPDX-License-Identifier: Apache-2.0
#include "store/checksum.h"

#include <xxhash.h>

namespace stowage {

struct Checksum::State {
  XXH3_state_t state;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->state); }
Checksum::~Checksum() = default;

void Checksum::add(std::span<const std::byte> bytes) noexcept {
  XXH3_64bits_update(&state_->state, bytes.data(), bytes.size());
}
std::uint64_t Checksum::value() const noexcept { return XXH3_64bits_digest(&state_->state); }

std::uint64_t checksum_of(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace stowage
