// SPDX-License-Identifier: Apache-2.0
// `stowage bench --schedule`: how well products would share more threads than this machine has.
// Each part is run alone, timed, and dealt to the thread that would be idle first; what is between
// parallel stretches is on the critical path as it is. What it costs to wake threads is not in it.
#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <queue>
#include <span>

#include "base/formatted.h"
#include "cli/bench.h"
#include "cli/bench_case.h"
#include "cli/text.h"
#include "stowage/info.h"

namespace stowage::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Claims threads, and has one, which notes how long each part takes. Where a body is run again,
/// the shortest time counts: what disturbs the machine disturbs single parts, and would be waited
/// for.
class Dealt final : public Executor {
 public:
  explicit Dealt(int threads) : threads_(threads) {}
  int threads() const noexcept override { return threads_; }
  void run(std::int64_t count, Task task, void* context) override {
    note(0);  // what no other thread can do meanwhile
    for (std::int64_t i = 0; i < count; ++i) {
      task(context, i);
      note(count);
    }
  }
  void again(const std::function<void()>& body) {
    at_ = 0;
    since_ = Clock::now();
    body();
    note(0);
  }

  struct Times {
    double all, path;  // seconds: of all threads together, and until the last one ends
  };
  Times times() const {
    Times made{};
    for (std::size_t i = 0; i < notes_.size();) {
      const auto count = static_cast<std::size_t>(notes_[i].parts);
      const double took = dealt(std::span(notes_).subspan(i, std::max<std::size_t>(1, count)));
      made.path += took;
      for (std::size_t end = i + std::max<std::size_t>(1, count); i < end; ++i)
        made.all += notes_[i].seconds;
    }
    return made;
  }

 private:
  struct Note {
    std::int64_t parts;  // of the stretch that this is one of; 0: it is no part
    double seconds;
  };

  void note(std::int64_t parts) {
    const Clock::time_point now = Clock::now();
    const double took = std::chrono::duration<double>(now - since_).count();
    if (at_ == notes_.size())
      notes_.push_back({parts, took});
    else
      notes_[at_].seconds = std::min(notes_[at_].seconds, took);
    ++at_;
    since_ = Clock::now();
  }

  double dealt(std::span<const Note> parts) const {
    std::priority_queue<double, std::vector<double>, std::greater<>> busy_until(
        {}, std::vector<double>(static_cast<std::size_t>(threads_), 0.0));
    double last = 0;
    for (const Note& part : parts) {
      const double end = busy_until.top() + part.seconds;
      busy_until.pop();
      busy_until.push(end);
      last = std::max(last, end);
    }
    return last;
  }

  const int threads_;
  std::vector<Note> notes_;
  std::size_t at_ = 0;
  Clock::time_point since_;
};

}  // namespace

std::vector<ScheduleRow> measure_schedule(const BenchOptions& options, std::int64_t size) {
  std::vector<ScheduleRow> rows;
  constexpr std::int64_t kPool = 96 << 20;
  BenchMemory memory({std::max<std::int64_t>(size, 1024), size, size, kPool, 0, {}});
  std::vector<int> threads{1};
  for (int some = 4; some < options.schedule; some *= 4) threads.push_back(some);
  threads.push_back(options.schedule);
  const std::size_t cases = linear_cases(memory, inline_executor()).size();
  for (std::size_t i = 0; i < cases; ++i) {
    std::vector<std::unique_ptr<Dealt>> executors;
    std::vector<BenchCase> of;
    for (const int some : threads) {
      executors.push_back(std::make_unique<Dealt>(some));
      of.push_back(linear_cases(memory, *executors.back())[i]);
    }
    if (of[0].name.find(options.only) == std::string::npos) continue;
    for (int run = 0; run < (options.quick ? 3 : 9); ++run)
      for (std::size_t k = 0; k < of.size(); ++k) executors[k]->again(of[k].run);
    const double alone = executors[0]->times().all;
    for (std::size_t k = 1; k < of.size(); ++k) {
      const Dealt::Times times = executors[k]->times();
      rows.push_back(
          {of[k].name, size, threads[k], times.all / alone, times.path / (alone / threads[k])});
    }
  }
  return rows;
}

void bench_schedule(const BenchOptions& options) {
  std::vector<ScheduleRow> rows;
  for (const std::int64_t size : {1024, 4096})
    if (!options.quick || size == 1024)
      for (ScheduleRow& row : measure_schedule(options, size)) rows.push_back(std::move(row));
  if (options.json) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const ScheduleRow& row : rows)
      list.push_back({{"name", row.name},
                      {"size", row.size},
                      {"threads", row.threads},
                      {"processor", row.processor},
                      {"path", row.path},
                      {"isa", instruction_set()}});
    return print(json_text(list));
  }
  Table table({"product", "weight", "threads", "processor time of one", "path of an equal share"},
              1);
  for (const ScheduleRow& row : rows)
    table.add({row.name, formatted("{0} x {0}", row.size), std::to_string(row.threads),
               formatted("{:.2f}", row.processor), formatted("{:.2f}", row.path)});
  print(formatted("{}, {}\n{}", instruction_set(), version(), table.text()));
}

}  // namespace stowage::cli
