// SPDX-License-Identifier: Apache-2.0
// A small pool. The caller of run() works too and could finish alone, so a run never waits for a
// thread that has not joined it: nested runs, late threads and forked children cannot deadlock.
#include "base/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/fork.h"
#include "stowage/error.h"
#include "stowage/info.h"

namespace stowage {
namespace {

// How often an idle thread looks for work, and a caller for the end, before it sleeps: some 20 us,
// which spans the gap between the layers of a model and costs nothing that a profile would show.
constexpr int kSpins = 500;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

thread_local bool inside_run = false;  // this thread runs a task: a nested run stays on it

struct Job {
  Executor::Task task;
  void* context;
  std::int64_t count;
  std::atomic<std::int64_t> next{0};  // the first index that nobody has taken
  std::atomic<bool> failed{false};
  std::atomic<int> helpers{0};  // pool threads inside; changed under Shared::mutex
  std::exception_ptr error{};   // the first one; written by whoever sets `failed`

  bool open() const noexcept { return next.load(std::memory_order_relaxed) < count; }

  void work() noexcept {
    inside_run = true;
    while (!failed.load(std::memory_order_relaxed)) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      try {
        task(context, i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
    inside_run = false;
  }
};

// What the threads of a pool share. A forked child gets a fresh one: there the threads do not exist
// and the mutex may be held for ever, so that what the parent had is left behind as it is.
struct Shared {
  const std::uint64_t process = process_generation();
  std::mutex mutex;
  std::condition_variable wake, done;
  std::vector<Job*> jobs;  // those that may still have indices to take
  std::atomic<std::uint64_t> posted{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  Job* join_any() {  // under mutex
    for (Job* job : jobs) {
      if (!job->open()) continue;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      return job;
    }
    return nullptr;
  }
  void leave(Job* job) {
    const std::lock_guard lock(mutex);
    // The caller may destroy the job as soon as it reads 0: nothing of it is touched after this.
    if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) done.notify_all();
  }
  void spin_until_posted(std::uint64_t seen) const noexcept {
    for (int i = 0; i < kSpins && posted.load(std::memory_order_acquire) == seen; ++i) pause();
  }
  void serve() {
    while (!stop.load()) {
      const std::uint64_t seen = posted.load(std::memory_order_acquire);
      Job* job = nullptr;
      {
        const std::lock_guard lock(mutex);
        job = join_any();
      }
      if (job != nullptr) {
        job->work();
        leave(job);
        continue;
      }
      spin_until_posted(seen);
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop.load() || posted.load() != seen; });
    }
  }
};

class Pool final : public Executor {
 public:
  explicit Pool(int threads) : threads_(threads), shared_(new Shared) {}
  ~Pool() override {
    Shared* const shared = shared_.load();
    if (shared->process != process_generation()) return;
    {
      const std::lock_guard lock(shared->mutex);
      shared->stop = true;
    }
    shared->wake.notify_all();
    for (std::thread& thread : shared->threads) thread.join();
    delete shared;
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const noexcept override { return threads_; }

  void run(std::int64_t count, Task task, void* context) override {
    if (count <= 1 || threads_ == 1 || inside_run) {
      for (std::int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    Job job{task, context, count};
    Shared& shared = of_this_process();
    post(shared, &job);
    job.work();
    if (shared.process != process_generation()) {
      throw Error(Code::unsupported,
                  "threads: a process must not fork inside a parallel task, got a child of one");
    }
    retire(shared, &job);
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  Shared& of_this_process() {
    Shared* found = shared_.load();
    if (found->process == process_generation()) return *found;
    auto fresh = std::make_unique<Shared>();
    return shared_.compare_exchange_strong(found, fresh.get()) ? *fresh.release() : *found;
  }

  void post(Shared& shared, Job* job) {
    {
      const std::lock_guard lock(shared.mutex);
      shared.jobs.push_back(job);
      if (shared.threads.empty()) start_threads(shared);
      shared.posted.fetch_add(1, std::memory_order_release);
    }
    shared.wake.notify_all();
  }

  static void retire(Shared& shared, Job* job) {
    std::unique_lock lock(shared.mutex);
    std::erase(shared.jobs, job);  // nobody joins from here on
    lock.unlock();
    for (int i = 0; i < kSpins; ++i) {
      if (job->helpers.load(std::memory_order_acquire) == 0) return;
      pause();
    }
    lock.lock();
    shared.done.wait(lock, [&] { return job->helpers.load(std::memory_order_acquire) == 0; });
  }

  // Under mutex. Where the system starts fewer than asked for, or none, run() finishes on those
  // there are.
  void start_threads(Shared& shared) noexcept {
    try {
      shared.threads.reserve(static_cast<std::size_t>(threads_ - 1));
      for (int i = 1; i < threads_; ++i)
        shared.threads.push_back(start_thread([&shared] { shared.serve(); }));
    } catch (const std::exception&) {
    }
  }

  const int threads_;
  std::atomic<Shared*> shared_;
};

class Inline final : public Executor {
 public:
  int threads() const noexcept override { return 1; }
  void run(std::int64_t count, Task task, void* context) override {
    for (std::int64_t i = 0; i < count; ++i) task(context, i);
  }
};

/// The calling thread has the signals blocked that are not its own while this lives; a thread that
/// it starts meanwhile has them so for ever.
class ForeignSignalsBlocked {
 public:
  ForeignSignalsBlocked() noexcept {
    sigset_t foreign;
    sigfillset(&foreign);
    for (const int own : {SIGBUS, SIGFPE, SIGILL, SIGSEGV}) sigdelset(&foreign, own);
    pthread_sigmask(SIG_SETMASK, &foreign, &before_);
  }
  ForeignSignalsBlocked(const ForeignSignalsBlocked&) = delete;
  ~ForeignSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_thread(std::function<void()> body) {
  const ForeignSignalsBlocked blocked;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(Code::out_of_memory,
                "threads: the system must start one more, got " + error.code().message());
  }
}

std::unique_ptr<Executor> make_pool(int threads) {
  return std::make_unique<Pool>(std::clamp(threads, 1, env::kMaxThreads));
}

int available_cpus() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool known = sched_getaffinity(0, sizeof set, &set) == 0;  // false beyond 1024 CPUs
  const int count = known ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(count, 1, env::kMaxThreads);
}

inline namespace v0 {

Executor::~Executor() = default;

Executor& default_executor() {
  // Never destroyed: at exit other threads and static objects may still use it.
  static auto* const pool = new Pool(env::threads() != 0 ? env::threads() : available_cpus());
  return *pool;
}

Executor& inline_executor() noexcept {
  static Inline executor;
  return executor;
}

int thread_count() { return default_executor().threads(); }

}  // namespace v0
}  // namespace stowage
