// SPDX-License-Identifier: Apache-2.0
// The core's work on torch's threads, so that torch.set_num_threads rules and no second thread pool
// exists in the process.
#pragma once
#include "stowage/executor.h"

namespace stowage::door {
Executor& torch_executor() noexcept;
}  // namespace stowage::door
