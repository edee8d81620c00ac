// SPDX-License-Identifier: Apache-2.0
// The core's work on torch's threads, so that torch.set_num_threads rules and no second thread pool
// exists in the process.
#pragma once
#include <functional>

#include "stowage/executor.h"

namespace stowage::door {
Executor& torch_executor() noexcept;

/// What is done behind each task of the runs that this thread asks for from now on, on the thread
/// of the task, with the task's part of its run (0 to 1]. It must not throw. Empty: nothing.
using AfterTask = std::function<void(double part)>;
void after_each_task(AfterTask what);
}  // namespace stowage::door
