// SPDX-License-Identifier: Apache-2.0
#include "stowage/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;
using nlohmann::json;

struct Trace : testing::Test {
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_));
  Needs needs_{file_};

  static json stop() { return json::parse(stop_trace()); }
};

TEST_F(Trace, HasReadsWaitsAndUses) {
  Engine engine(file_, {.ram = needs_.least, .reads = Reads::buffered, .workers = 0});
  (void)engine.acquire(engine.find(weight_name(0)).value());  // before it: not traced
  start_trace();
  for (int i = 0; i < 6; ++i) (void)engine.acquire(engine.find(weight_name(i)).value());
  const EngineReport report = engine.report();
  const json trace = stop();
  (void)engine.acquire(engine.find(weight_name(0)).value());  // after it
  EXPECT_EQ(trace["dropped"], 0);
  const json& events = trace["traceEvents"];
  std::map<std::string, int> kinds;
  std::uint64_t bytes = 0;
  double last = 0;
  for (const json& event : events) {
    ++kinds[event["cat"]];
    EXPECT_EQ(event["ph"], "X");
    EXPECT_GE(event["ts"], last);
    EXPECT_GE(event["dur"], 0);
    last = event["ts"];
    if (event["cat"] == "read") bytes += event["args"]["bytes"].get<std::uint64_t>();
  }
  EXPECT_EQ(kinds["use"], 6);
  EXPECT_EQ(kinds["wait"], static_cast<int>(report.misses) - 1);
  EXPECT_EQ(events[0]["cat"], "use");  // the first was in memory
  EXPECT_GT(bytes, 0u);
  EXPECT_LE(bytes, report.bytes_read);
}

TEST_F(Trace, ReadersHaveThreadsOfTheirOwn) {
  start_trace();
  {
    Engine engine(file_, {.ram = needs_.all, .reads = Reads::buffered, .workers = 1});
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 0; i < 6; ++i) (void)engine.acquire(engine.find(weight_name(i)).value());
  }
  const json trace = stop();
  std::map<std::string, std::set<long>> threads;
  for (const json& event : trace["traceEvents"])
    threads[event["cat"]].insert(event["tid"].get<long>());
  EXPECT_EQ(threads["use"].size(), 1u);
  EXPECT_LE(threads["read"].size(), 2u);
}

TEST_F(Trace, KeepsAsManyEventsAsAsked) {
  Engine engine(file_, {.ram = needs_.least, .reads = Reads::buffered, .workers = 0});
  start_trace(4);
  for (int i = 0; i < 6; ++i) (void)engine.acquire(engine.find(weight_name(i)).value());
  const json trace = stop();
  EXPECT_EQ(trace["traceEvents"].size(), 4u);
  EXPECT_GT(trace["dropped"], 0);
}

TEST_F(Trace, OneAtATime) {
  EXPECT_STOWAGE_ERROR((void)stop_trace(), invalid_argument, "one must be running, got none");
  start_trace();
  EXPECT_STOWAGE_ERROR(start_trace(), invalid_argument, "the one that runs must end first");
  EXPECT_EQ(stop()["traceEvents"].size(), 0u);
}

}  // namespace
}  // namespace stowage
