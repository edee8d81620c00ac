// SPDX-License-Identifier: Apache-2.0
// What a thread is expected to use next, as far as it has been looked ahead.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/order.h"

namespace stowage::engine {

/// Units in the order of their expected use. Nothing here allocates after the constructor.
class Window {
 public:
  static constexpr std::size_t kMost = 512;   // units that are looked ahead
  static constexpr std::size_t kStride = 64;  // and at one time

  Window() : ids_(kMost), bytes_(kMost) {}

  std::size_t size() const noexcept { return size_; }
  std::uint64_t bytes() const noexcept { return total_; }
  WeightId first() const noexcept { return size_ == 0 ? kNone : ids_[begin_]; }
  const Turn& end() const noexcept { return end_; }
  std::uint64_t epoch = 0;  // of the engine's expectations, when it was filled

  void restart(const Turn& turn) noexcept {
    begin_ = size_ = 0;
    total_ = 0;
    end_ = turn;
  }
  void push(WeightId id, std::uint64_t bytes) noexcept {
    const std::size_t at = (begin_ + size_++) % kMost;
    ids_[at] = id;
    bytes_[at] = bytes;
    total_ += bytes;
    end_ = end_.then(id);
  }
  WeightId pop() noexcept {
    const std::size_t at = begin_;
    begin_ = (begin_ + 1) % kMost;
    --size_;
    total_ -= bytes_[at];
    return ids_[at];
  }

 private:
  std::vector<WeightId> ids_;  // a ring
  std::vector<std::uint64_t> bytes_;
  std::size_t begin_ = 0, size_ = 0;
  std::uint64_t total_ = 0;
  Turn end_{};
};

}  // namespace stowage::engine
