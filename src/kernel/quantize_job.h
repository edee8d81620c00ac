// SPDX-License-Identifier: Apache-2.0
// What the paths of quantizing share: their task, and what their pieces find together.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "format/convert.h"
#include "kernel/kernels.h"
#include "stowage/descriptor.h"
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
  const Descriptor& form;  // of the storage
  std::span<void* const> parts;
  Executor& executor;

  std::size_t codes() const { return static_cast<std::size_t>(storage.codes); }
  std::size_t in() const { return static_cast<std::size_t>(value_index(dtype)); }
  const char* at(std::int64_t i) const { return values + i * (bits(dtype) / 8); }

  /// Value i, exact: for what no kernel does.
  double value(std::int64_t i) const noexcept {
    switch (dtype) {
      case Dtype::f64:
        return element<double>(i);
      case Dtype::bf16:
        return bf16_to_f32(element<std::uint16_t>(i));
      case Dtype::f16:
        return f16_to_f32(element<std::uint16_t>(i));
      default:
        return element<float>(i);
    }
  }
  template <class T>
  T element(std::int64_t i) const noexcept {
    T value;
    std::memcpy(&value, at(i), sizeof value);
    return value;
  }

  std::uint8_t* code(std::int64_t i) const {
    return static_cast<std::uint8_t*>(parts[0]) + i * trait(storage.codes).bits / 8;
  }
};

}  // namespace stowage
