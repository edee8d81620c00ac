// SPDX-License-Identifier: Apache-2.0
// What the paths of quantizing share: their task, and what their pieces find together.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/kernels.h"
#include "stowage/executor.h"

namespace stowage {

/// The largest of what many tasks report.
class Largest {
 public:
  void take(std::uint32_t bits) noexcept {
    std::uint32_t seen = bits_.load(std::memory_order_relaxed);
    while (seen < bits && !bits_.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  }
  std::uint32_t bits() const noexcept { return bits_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint32_t> bits_{0};
};

/// What quantize_with() was asked for, checked.
struct QuantizeJob {
  const Kernels& kernels;
  const char* values;
  Dtype dtype;
  std::int64_t n;
  const Storage& storage;
  std::span<void* const> parts;
  Executor& executor;

  std::size_t codes() const { return static_cast<std::size_t>(storage.codes); }
  std::size_t in() const { return static_cast<std::size_t>(value_index(dtype)); }
  const char* at(std::int64_t i) const { return values + i * (bits(dtype) / 8); }

  std::uint8_t* code(std::int64_t i) const {
    return static_cast<std::uint8_t*>(parts[0]) + i * trait(storage.codes).bits / 8;
  }
};

}  // namespace stowage
