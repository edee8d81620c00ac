// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace pretend {
namespace {

thread_local Clock host;  // what the thread has waited for

std::string text(Lane lane) {
  return std::to_string(lane.first) + "/" + std::to_string(lane.second);
}

}  // namespace

Memory& memory() {
  static auto* const made = new Memory;  // tensors may outlive the statics
  return *made;
}

void* Memory::allocate(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  void* data = nullptr;
  if (posix_memalign(&data, 256, std::max<std::size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  std::memset(data, kPoison, bytes);
  Counters& c = counters.at(static_cast<std::size_t>(device));
  c.held += static_cast<std::int64_t>(bytes);
  c.peak = std::max(c.peak, c.held);
  return data;
}

void Memory::release(int device, void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const auto *begin = static_cast<const char*>(data), *end = begin + bytes;
  for (auto& [lane, queue] : queues_) {
    for (Work& work : queue.waiting) {
      for (const void* at : work.memory) {
        if (at < begin || at >= end) continue;
        races_.insert("memory freed that a copy of stream " + text(lane) + " waits for");
        work.run = [] {};
      }
    }
  }
  std::erase_if(accesses_, [&](const Access& a) { return a.begin < end && begin < a.end; });
  std::memset(data, kPoison, bytes);
  std::free(data);
  counters.at(static_cast<std::size_t>(device)).held -= static_cast<std::int64_t>(bytes);
}

void Memory::pin(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  pinned_[static_cast<const char*>(data)] = bytes;
  pinned_held_ += static_cast<std::int64_t>(bytes);
  pinned_peak_ = std::max(pinned_peak_, pinned_held_);
}

std::array<std::int64_t, 2> Memory::pinned_bytes() {
  const std::lock_guard lock(mutex);
  return {pinned_held_, pinned_peak_};
}

void Memory::unpin(void* data) {
  const std::lock_guard lock(mutex);
  const auto* begin = static_cast<const char*>(data);
  for (auto& [lane, queue] : queues_) {  // as torch's allocators do: freed when the copies are done
    const bool used = std::ranges::any_of(queue.waiting, [&](const Work& work) {
      return std::ranges::any_of(
          work.memory, [&](const void* at) { return at >= begin && at < begin + pinned_[begin]; });
    });
    if (used) drain(lane, queue.done + queue.waiting.size());
  }
  pinned_held_ -= static_cast<std::int64_t>(pinned_[begin]);
  pinned_.erase(begin);
}

bool Memory::is_pinned(const void* data) {
  const std::lock_guard lock(mutex);
  const auto* at = static_cast<const char*>(data);
  auto after = pinned_.upper_bound(at);
  if (after == pinned_.begin()) return false;
  --after;
  return at < after->first + after->second;
}

void Memory::touch(Lane lane, const void* data, std::size_t bytes, bool writes) {
  const std::lock_guard lock(mutex);
  if (bytes == 0) return;
  Clock& clock = clocks_[lane];
  merge(clock, host);
  const std::uint64_t now = ++clock[lane];
  const auto *begin = static_cast<const char*>(data), *end = begin + bytes;
  for (const Access& a : accesses_) {
    if (a.begin >= end || begin >= a.end || a.lane == lane || !(a.writes || writes)) continue;
    if (clock[a.lane] < a.at) {
      races_.insert("streams " + text(a.lane) + (a.writes ? " (writes) and " : " (reads) and ") +
                    text(lane) + (writes ? " (writes)" : " (reads)") + " meet without an event");
    }
  }
  std::erase_if(accesses_, [&](const Access& a) {
    return begin <= a.begin && a.end <= end && (writes || (a.lane == lane && !a.writes));
  });
  accesses_.push_back({begin, end, lane, now, writes});
}

void Memory::give(Lane lane, std::function<void()> work, std::vector<const void*> places) {
  const std::lock_guard lock(mutex);
  Queue& queue = queues_[lane];
  queue.waiting.push_back({std::move(work), std::move(places)});
  if (!lazy) drain(lane, queue.done + queue.waiting.size());
}

double Memory::pass(Lane lane, double begin, double takes) {
  double& end = ends_[lane];
  return end = std::max({end, begin, host_}) + takes;
}

void Memory::compute(Lane lane, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  const double takes = speeds.work + speeds.byte_of_work * static_cast<double>(bytes);
  pass(lane, 0, takes);
  computed_ += takes;
}

void Memory::cross(Lane lane, std::size_t bytes, bool in, bool waits) {
  const std::lock_guard lock(mutex);
  const double takes = speeds.copy + speeds.byte_copied * static_cast<double>(bytes);
  double& engine = engine_ends_[{lane.first, in || speeds.engines == 1 ? 0 : 1}];
  engine = pass(lane, engine, takes);
  copied_ += takes;
  if (waits) host_ = engine;
}

std::array<double, 3> Memory::times() {
  const std::lock_guard lock(mutex);
  return {host_, copied_, computed_};
}

void Memory::record(Event& event, Lane lane) {
  const std::lock_guard lock(mutex);
  Clock& clock = clocks_[lane];
  merge(clock, host);
  ++clock[lane];
  const Queue& queue = queues_[lane];
  event = {lane, clock, queue.done + queue.waiting.size(), std::max(ends_[lane], host_)};
}

void Memory::block(const Event& event, Lane lane) {
  const std::lock_guard lock(mutex);
  if (event.lane != lane) drain(event.lane, event.position);
  merge(clocks_[lane], event.clock);
  ends_[lane] = std::max(ends_[lane], event.time);
}

bool Memory::is_done(const Event& event) {
  const std::lock_guard lock(mutex);
  const bool done = queues_[event.lane].done >= event.position && event.time <= host_;
  if (done) merge(host, event.clock);
  return done;
}

void Memory::wait(const Event& event) {
  const std::lock_guard lock(mutex);
  drain(event.lane, event.position);
  merge(host, event.clock);
  host_ = std::max(host_, event.time);
}

void Memory::wait(Lane lane) {
  const std::lock_guard lock(mutex);
  Queue& queue = queues_[lane];
  drain(lane, queue.done + queue.waiting.size());
  merge(host, clocks_[lane]);
  host_ = std::max(host_, ends_[lane]);
}

void Memory::wait_device(int device) {
  const std::lock_guard lock(mutex);
  std::vector<Lane> lanes;
  for (const auto& [lane, clock] : clocks_) {
    if (lane.first == device) lanes.push_back(lane);
  }
  for (const Lane lane : lanes) wait(lane);
}

bool Memory::is_idle(Lane lane) {
  const std::lock_guard lock(mutex);
  return queues_[lane].waiting.empty();
}

std::int64_t Memory::new_stream() {
  const std::lock_guard lock(mutex);
  return ++streams_made_;
}

std::string Memory::races() {
  const std::lock_guard lock(mutex);
  std::string all;
  for (const std::string& race : races_) all += race + "\n";
  return all;
}

void Memory::reset() {
  const std::lock_guard lock(mutex);
  for (Counters& c : counters) c = {c.held, c.held};
  pinned_peak_ = pinned_held_;
  races_.clear();
}

void Memory::drain(Lane lane, std::uint64_t position) {
  Queue& queue = queues_[lane];
  while (queue.done < position && !queue.waiting.empty()) {
    const Work work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    work.run();
    ++queue.done;
  }
}

void Memory::merge(Clock& into, const Clock& other) {
  for (const auto& [lane, at] : other) into[lane] = std::max(into[lane], at);
}

}  // namespace pretend
