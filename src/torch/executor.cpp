// SPDX-License-Identifier: Apache-2.0
// Executor over torch's parallel_for.
#include "torch/executor.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <exception>

namespace stowage::door {
namespace {

struct Job {
  Executor::Task task;
  void* context;
  std::exception_ptr error;
  std::atomic<bool> failed{false};

  void run(std::int64_t begin, std::int64_t end) noexcept {
    try {
      for (std::int64_t i = begin; i < end && !failed.load(std::memory_order_relaxed); ++i) {
        task(context, i);
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
    if (count <= 1 || threads() == 1) {
      for (std::int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    Job job{task, context, nullptr};
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(
        0, count, 1,
        [](std::int64_t begin, std::int64_t end, void* c) {
          static_cast<Job*>(c)->run(begin, end);
        },
        &job));
    if (job.error) std::rethrow_exception(job.error);
  }
};

}  // namespace

Executor& torch_executor() noexcept {
  static TorchExecutor executor;
  return executor;
}

}  // namespace stowage::door
