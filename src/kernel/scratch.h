// SPDX-License-Identifier: Apache-2.0
// Scratch memory for the life of a scope; the pool behind it is in stowage/executor.h.
#pragma once
#include <cstddef>

#include "stowage/executor.h"

namespace stowage {

class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : memory_(take_scratch(bytes)) {}
  ~Scratch() { give_scratch(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* memory() const noexcept { return memory_; }
  float* floats() const noexcept { return static_cast<float*>(memory_); }

 private:
  void* memory_;
};

}  // namespace stowage
