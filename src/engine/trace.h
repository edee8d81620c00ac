// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "stowage/trace.h"

namespace stowage::engine {

enum class TraceKind : std::uint8_t { read, wait, use, form };

using TraceTime = std::chrono::steady_clock::time_point;

inline std::atomic<bool> tracing = false;

/// The time where a trace is running, else the epoch, which trace() passes over: what is not traced
/// costs one load.
inline TraceTime trace_time() noexcept {
  return tracing.load(std::memory_order_relaxed) ? std::chrono::steady_clock::now() : TraceTime{};
}

/// Notes what began at `begun` and ends now, on this thread.
void trace(TraceKind kind, const std::string& name, std::uint64_t bytes, TraceTime begun) noexcept;

}  // namespace stowage::engine
