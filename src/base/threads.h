// SPDX-License-Identifier: Apache-2.0
// The thread pool behind default_executor(). Threads start at the first run that can use them.
#pragma once
#include <functional>
#include <memory>
#include <thread>

#include "stowage/executor.h"

namespace stowage {

/// A pool of its own with `threads` threads, the caller's included. The destructor waits for them.
std::unique_ptr<Executor> make_pool(int threads);

/// A thread of ours. Signals are for the host's threads and blocked in it, but for those that a
/// thread causes itself: blocked, they would end the process past every handler (map_guard.h).
/// Throws out_of_memory where the system starts no more threads; the caller's signals are as they
/// were.
std::thread start_thread(std::function<void()> body);

/// The CPUs that this process may run on (its affinity mask); at least 1.
int available_cpus() noexcept;

}  // namespace stowage
