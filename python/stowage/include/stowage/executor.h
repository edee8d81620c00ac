// SPDX-License-Identifier: Apache-2.0
// Where parallel work runs. The core has a small pool; a host with its own threads injects them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

class STOWAGE_API Executor {
 public:
  using Task = void (*)(void* context, std::int64_t index);
  virtual ~Executor();
  /// Threads that run() may use, the caller's included; at least 1.
  virtual int threads() const noexcept = 0;
  /// Calls task(context, i) once for each i < count, in any order, and returns when all are done.
  /// The first exception is rethrown. May be called from several threads at once.
  virtual void run(std::int64_t count, Task task, void* context) = 0;

  template <class Body>
  void for_each(std::int64_t count, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        count, [](void* c, std::int64_t i) { (*static_cast<Plain*>(c))(i); },
        const_cast<std::remove_const_t<Plain>*>(std::addressof(body)));
  }
};

/// The process-wide pool, made at first use with STOWAGE_THREADS threads (default: the CPUs that
/// this process may run on).
STOWAGE_API Executor& default_executor();
/// Runs everything on the calling thread.
STOWAGE_API Executor& inline_executor() noexcept;

/// Working memory of at least `bytes`, page-aligned, from a pool of the process: fresh pages cost
/// several times what writing them does. What is in it is anything. Throws out_of_memory.
STOWAGE_API void* take_scratch(std::size_t bytes);
/// Gives it back, from any thread; null is allowed.
STOWAGE_API void give_scratch(void* memory) noexcept;

struct ScratchUse {
  std::size_t live = 0;  // bytes taken and not yet given back
  std::size_t idle = 0;  // bytes kept for the next taker; bounded
  std::size_t peak = 0;  // the most that was live since the last scratch_use(true)
};
STOWAGE_API ScratchUse scratch_use(bool restart_peak = false) noexcept;

}  // namespace v0
}  // namespace stowage
