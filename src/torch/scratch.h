// SPDX-License-Identifier: Apache-2.0
// Working memory that lives during one op, from the core's pool: what an op and the kernels under
// it use is counted and bounded together.
#pragma once
#include <cstddef>

#include "stowage/executor.h"

namespace stowage::door {

/// A page-aligned block of at least `bytes`. Throws out_of_memory.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : data_(take_scratch(bytes)) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { give_scratch(data_); }
  void* data() const noexcept { return data_; }

 private:
  void* data_;
};
}  // namespace stowage::door
