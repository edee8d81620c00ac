// SPDX-License-Identifier: Apache-2.0
// Executor over torch's parallel_for.
#include "torch/executor.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace stowage::door {
namespace {

thread_local AfterTask behind;

// Each thread takes the next task that none has: torch gives all of them as many, and the others
// would wait for one that the system interrupts.
struct Job {
  Executor::Task task;
  void* context;
  std::int64_t count;
  const AfterTask& after;
  std::exception_ptr error = nullptr;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};

  void run() noexcept {
    try {
      while (!failed.load(std::memory_order_relaxed)) {
        const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) return;
        task(context, i);
        if (after) after(1.0 / static_cast<double>(count));
      }
    } catch (...) {  // torch's C functions would drop its type and its text
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

class TorchExecutor final : public Executor {
 public:
  int threads() const noexcept override {
    std::uint32_t count = 1;
    torch_get_num_threads(&count);
    return static_cast<int>(count);
  }
  void run(std::int64_t count, Task task, void* context) override {
    const std::int64_t takers = std::min<std::int64_t>(count, threads());
    Job job{task, context, count, behind};
    if (takers <= 1) {
      job.run();
    } else {
      TORCH_ERROR_CODE_CHECK(torch_parallel_for(
          0, takers, 1,
          [](std::int64_t, std::int64_t, void* taken) { static_cast<Job*>(taken)->run(); }, &job));
    }
    if (job.error) std::rethrow_exception(job.error);
  }
};

}  // namespace

Executor& torch_executor() noexcept {
  static TorchExecutor executor;
  return executor;
}

void after_each_task(AfterTask what) { behind = std::move(what); }

}  // namespace stowage::door
