// SPDX-License-Identifier: Apache-2.0
// Working memory that lives during one op and is used again by the next: a fresh 4 MiB block costs
// a thousand page faults, more than filling it.
#pragma once
#include <cstddef>

namespace stowage::door {

/// A block of at least `bytes`, aligned to 64. What a pool keeps between uses is bounded (64 MiB);
/// larger blocks go back to the system at once.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);  // throws std::bad_alloc
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();
  void* data() const noexcept { return data_; }

 private:
  std::size_t capacity_ = 0;
  void* data_ = nullptr;
};
}  // namespace stowage::door
