// SPDX-License-Identifier: Apache-2.0
// Streams are queues with a thread each. An event is a number; what waits for one looks it up among
// those that are open.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "base/threads.h"
#include "engine/arena.h"
#include "stowage/device.h"

namespace stowage {
inline namespace v0 {

Device::~Device() = default;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kStep = std::uint64_t{1} << 16;  // bytes between two looks at the clock

struct Task {
  Device::Event event;  // done when the task is
  std::vector<Device::Event> after;
  std::function<void()> work;
};

struct Queue {
  std::deque<Task> tasks;
  std::thread thread;
};

}  // namespace

struct PretendDevice::State {
  explicit State(const PretendOptions& given) : options(given) {}
  State(const State&) = delete;
  ~State() {  // what was asked for is done before the end
    {
      const std::scoped_lock lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    for (Queue& queue : queues) queue.thread.join();
    for (const auto& [place, bytes] : memory) {
      std::memset(place, kPoison, bytes);
      std::free(place);
    }
  }

  const std::uint64_t process = process_generation();

  const PretendOptions options;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Queue> queues;  // the first copies, the second is the default stream
  std::set<Event> open;
  std::map<Event, std::exception_ptr> failed;
  std::map<void*, std::uint64_t> memory, pinned;  // and its bytes
  std::uint64_t allocated = 0, copied = 0;
  Event last = 0;
  int failures = 0;
  bool stopping = false;

  bool are_done(const std::vector<Event>& events) const {
    return std::ranges::none_of(events, [&](Event event) { return open.contains(event); });
  }

  Queue& queue_of(Stream stream) {
    return stream == nullptr ? queues[1] : *static_cast<Queue*>(stream);
  }

  Event add(Queue& queue, std::span<const Event> after, std::function<void()> work) {
    const std::scoped_lock lock(mutex);
    const Event event = ++last;
    open.insert(event);
    queue.tasks.push_back({event, {after.begin(), after.end()}, std::move(work)});
    changed.notify_all();
    return event;
  }

  void run(Queue& queue) {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] {
        return queue.tasks.empty() ? stopping : are_done(queue.tasks.front().after);
      });
      if (queue.tasks.empty()) return;  // what was asked for is done before the end
      const Task task = std::move(queue.tasks.front());
      lock.unlock();
      std::exception_ptr error;
      try {
        if (task.work) task.work();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      queue.tasks.pop_front();
      open.erase(task.event);
      if (error) failed[task.event] = error;
      changed.notify_all();
    }
  }

  void start_queue() {
    Queue& queue = queues.emplace_back();
    try {
      queue.thread = start_thread([this, &queue] { run(queue); });
    } catch (...) {
      queues.pop_back();
      throw;
    }
  }

  bool takes_failure() {
    const std::scoped_lock lock(mutex);
    return failures > 0 && failures-- > 0;
  }

  void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    if (takes_failure()) throw Error(Code::cuda, "pretend device: a copy failed, as was asked for");
    const Clock::time_point begun = Clock::now();
    for (std::uint64_t at = 0; at < bytes; at += kStep) {
      const std::uint64_t step = std::min(kStep, bytes - at);
      std::memcpy(to + at, from + at, step);
      if (options.bytes_per_second > 0) {
        const std::chrono::duration<double> due(static_cast<double>(at + step) /
                                                options.bytes_per_second);
        std::this_thread::sleep_until(begun + std::chrono::duration_cast<Clock::duration>(due));
      }
    }
    const std::scoped_lock lock(mutex);
    copied += bytes;
  }
};

PretendDevice::PretendDevice(const PretendOptions& options)
    : state_(std::make_unique<State>(options)) {
  state_->start_queue();
  state_->start_queue();
}

// Of the parent's device, nothing ends in a forked child: its threads are not here.
PretendDevice::~PretendDevice() {
  if (state_->process != process_generation()) (void)state_.release();
}

Device::Stream PretendDevice::make_stream() {
  const std::scoped_lock lock(state_->mutex);
  state_->start_queue();
  return &state_->queues.back();
}

Device::Event PretendDevice::launch(Stream stream, std::function<void()> work) {
  return state_->add(state_->queue_of(stream), {}, std::move(work));
}

void PretendDevice::fail_copies(int count) {
  const std::scoped_lock lock(state_->mutex);
  state_->failures = count;
}

std::uint64_t PretendDevice::allocated() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->allocated;
}

std::uint64_t PretendDevice::pinned() const {
  const std::scoped_lock lock(state_->mutex);
  std::uint64_t bytes = 0;
  for (const auto& [memory, size] : state_->pinned) bytes += size;
  return bytes;
}

std::uint64_t PretendDevice::copied() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->copied;
}

std::string PretendDevice::name() const { return "pretend"; }

void* PretendDevice::allocate(std::uint64_t bytes) {
  const std::scoped_lock lock(state_->mutex);
  const std::uint64_t free = state_->options.memory - state_->allocated;
  const std::uint64_t pages = (bytes + engine::kPage - 1) / engine::kPage * engine::kPage;
  void* const memory = bytes <= free ? std::aligned_alloc(engine::kPage, pages) : nullptr;
  if (memory == nullptr) {
    throw Error(Code::out_of_memory, "pretend device: " + std::to_string(bytes) +
                                         " bytes must be free, got " + std::to_string(free));
  }
  std::memset(memory, kPoison, pages);
  state_->memory[memory] = bytes;
  state_->allocated += bytes;
  return memory;
}

void PretendDevice::free(void* memory) noexcept {
  if (memory == nullptr) return;
  const std::scoped_lock lock(state_->mutex);
  const auto found = state_->memory.find(memory);
  if (found == state_->memory.end()) std::abort();  // freed twice, or never ours
  std::memset(memory, kPoison, found->second);
  state_->allocated -= found->second;
  state_->memory.erase(found);
  std::free(memory);
}

bool PretendDevice::pin(void* memory, std::uint64_t bytes) {
  const std::scoped_lock lock(state_->mutex);
  return state_->pinned.emplace(memory, bytes).second;
}

void PretendDevice::unpin(void* memory) noexcept {
  const std::scoped_lock lock(state_->mutex);
  if (state_->pinned.erase(memory) == 0) std::abort();  // unpinned twice, or never pinned
}

Device::Event PretendDevice::copy_in(void* to, const void* from, std::uint64_t bytes,
                                     std::span<const Event> after) {
  return state_->add(state_->queues[0], after, [this, to, from, bytes] {
    state_->copy(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
  });
}

Device::Event PretendDevice::record(Stream stream) {
  return state_->add(state_->queue_of(stream), {}, nullptr);
}

void PretendDevice::wait_on(Stream stream, Event event) {
  state_->add(state_->queue_of(stream), std::span(&event, 1), nullptr);
}

bool PretendDevice::done(Event event) {
  const std::scoped_lock lock(state_->mutex);
  return !state_->open.contains(event);
}

void PretendDevice::wait(Event event) {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return !state_->open.contains(event); });
  const auto failed = state_->failed.find(event);
  if (failed == state_->failed.end()) return;
  const std::exception_ptr error = failed->second;
  state_->failed.erase(failed);
  std::rethrow_exception(error);
}

}  // namespace v0
}  // namespace stowage
