// SPDX-License-Identifier: Apache-2.0
#include "engine/trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

namespace stowage {
namespace engine {
namespace {

struct Event {
  TraceKind kind;
  long thread;
  TraceTime begun, ended;
  std::uint64_t bytes;
  std::string name;  // a copy: the engine may end before the trace does
};

// The only one of its kind.
struct Recording {
  Recording();
  std::mutex mutex;
  std::vector<Event> events;
  std::size_t most = 0, dropped = 0;
  TraceTime begun;
};

Recording& recording() {
  static Recording one;
  return one;
}

Recording::Recording() {  // in a forked child no lost thread must hold the mutex
  pthread_atfork([] { recording().mutex.lock(); }, [] { recording().mutex.unlock(); },
                 [] { recording().mutex.unlock(); });
}

double microseconds(TraceTime::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

nlohmann::json json_of(const Event& event) {
  constexpr std::array<const char*, 4> kKinds = {"read", "wait", "use", "form"};
  const char* const kind = kKinds[static_cast<std::size_t>(event.kind)];
  return {{"name", event.name},
          {"cat", kind},
          {"ph", "X"},
          {"pid", ::getpid()},
          {"tid", event.thread},
          {"ts", microseconds(event.begun.time_since_epoch())},
          {"dur", microseconds(event.ended - event.begun)},
          {"args", {{"what", kind}, {"bytes", event.bytes}}}};
}

}  // namespace

void trace(TraceKind kind, const std::string& name, std::uint64_t bytes, TraceTime begun) noexcept {
  if (begun == TraceTime{}) return;
  const TraceTime ended = std::chrono::steady_clock::now();
  Recording& to = recording();
  const std::scoped_lock lock(to.mutex);
  if (!tracing.load(std::memory_order_relaxed) || begun < to.begun) return;
  if (to.events.size() == to.most) {
    ++to.dropped;
    return;
  }
  try {
    to.events.push_back({kind, ::syscall(SYS_gettid), begun, ended, bytes, name});
  } catch (const std::bad_alloc&) {
    ++to.dropped;
  }
}

}  // namespace engine

inline namespace v0 {

void start_trace(std::size_t most_events) {
  engine::Recording& to = engine::recording();
  const std::scoped_lock lock(to.mutex);
  if (engine::tracing)
    throw Error(Code::invalid_argument, "trace: the one that runs must end first, got another");
  to.events.clear();
  to.most = most_events;
  to.dropped = 0;
  to.begun = std::chrono::steady_clock::now();
  engine::tracing = true;
}

std::string stop_trace() {
  engine::Recording& from = engine::recording();
  std::vector<engine::Event> events;
  std::size_t dropped = 0;
  {
    const std::scoped_lock lock(from.mutex);
    if (!engine::tracing)
      throw Error(Code::invalid_argument, "trace: one must be running, got none");
    engine::tracing = false;
    events.swap(from.events);
    dropped = from.dropped;
  }
  std::ranges::sort(events, {}, &engine::Event::begun);
  nlohmann::json list = nlohmann::json::array();
  for (const engine::Event& event : events) list.push_back(engine::json_of(event));
  return nlohmann::json{
      {"displayTimeUnit", "ms"}, {"traceEvents", std::move(list)}, {"dropped", dropped}}
      .dump();
}

}  // namespace v0
}  // namespace stowage
