// SPDX-License-Identifier: Apache-2.0
// The thread pool behind default_executor(). Threads start at the first run that can use them.
#pragma once
#include <memory>

#include "stowage/executor.h"

namespace stowage {

/// A pool of its own with `threads` threads, the caller's included. The destructor waits for them.
std::unique_ptr<Executor> make_pool(int threads);

/// The CPUs that this process may run on (its affinity mask); at least 1.
int available_cpus() noexcept;

}  // namespace stowage
