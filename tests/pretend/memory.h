// SPDX-License-Identifier: Apache-2.0
// What the pretend device knows: how many bytes it holds, what crossed its link, which work waits,
// which work of two streams met in memory without an event between them, and when all of it would
// end on a device whose link and cores take the times that it is told.
#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pretend {

constexpr int kDevices = 3;
constexpr int kPoison = 0xFF;  // NaN in every floating type, new and freed memory is full of it

using Lane = std::pair<int, std::int64_t>;    // a device's stream
using Clock = std::map<Lane, std::uint64_t>;  // how far each stream is known to have come

struct Counters {
  std::int64_t held = 0, peak = 0, in = 0, out = 0, across = 0;
};

struct Event {
  Lane lane;
  Clock clock;
  std::uint64_t position = 0;  // works given to the stream before it
  double time = 0;             // at which it happens
};

/// What work takes, in nanoseconds and bytes for each: nothing, unless told.
struct Speeds {
  double copy = 0, byte_copied = 0;  // over the link
  double work = 0, byte_of_work = 0;
  int engines = 2;  // that copy: one for each direction, or one for both
};

class Memory {
 public:
  std::array<Counters, kDevices> counters;
  bool lazy = true;     // copies of side streams run as late as they may
  bool streams = true;  // whether streams can be made
  bool lacks = false;   // fp64 and float8, as MPS does
  Speeds speeds;

  void* allocate(int device, std::size_t bytes);
  void release(int device, void* data, std::size_t bytes);
  void pin(void* data, std::size_t bytes);
  void unpin(void* data);
  bool is_pinned(const void* data);
  std::array<std::int64_t, 2> pinned_bytes();  // now, and at most since reset()

  /// Notes work of a stream on [begin, begin + bytes), and a race where it meets other work.
  void touch(Lane lane, const void* begin, std::size_t bytes, bool writes);
  /// Runs `work` now, or when something waits for the stream.
  void give(Lane lane, std::function<void()> work, std::vector<const void*> memory);
  /// Work of the device that begins when the host has given it and its stream has come so far.
  void compute(Lane lane, std::size_t bytes);
  /// The same of the link, which copies one after the other; `waits`: the host, for its end.
  void cross(Lane lane, std::size_t bytes, bool in, bool waits);
  /// Nanoseconds that the host has come to, and that links and cores have worked.
  std::array<double, 3> times();
  void record(Event& event, Lane lane);
  void block(const Event& event, Lane lane);
  bool is_done(const Event& event);
  void wait(const Event& event);  // the host does
  void wait(Lane lane);           // for all of a stream
  void wait_device(int device);   // for all streams
  bool is_idle(Lane lane);
  std::int64_t new_stream();
  std::string races();
  void reset();

  std::recursive_mutex mutex;

 private:
  struct Access {
    const char *begin, *end;
    Lane lane;
    std::uint64_t at;
    bool writes;
  };
  struct Work {
    std::function<void()> run;
    std::vector<const void*> memory;
  };
  struct Queue {
    std::deque<Work> waiting;
    std::uint64_t done = 0;
  };

  void drain(Lane lane, std::uint64_t position);
  static void merge(Clock& into, const Clock& other);

  double pass(Lane lane, double begin, double takes);

  std::map<Lane, Clock> clocks_;
  std::map<Lane, double> ends_;
  std::map<std::pair<int, int>, double> engine_ends_;
  double host_ = 0, copied_ = 0, computed_ = 0;
  std::map<Lane, Queue> queues_;
  std::vector<Access> accesses_;
  std::map<const char*, std::size_t> pinned_;
  std::int64_t pinned_held_ = 0, pinned_peak_ = 0;
  std::set<std::string> races_;
  std::int64_t streams_made_ = 0;
};

Memory& memory();

}  // namespace pretend
