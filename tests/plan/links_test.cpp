// SPDX-License-Identifier: Apache-2.0
#include "plan/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>

#include "allocations.h"
#include "expect_error.h"
#include "scratch.h"

namespace stowage {
namespace {

TEST(Links, AreMeasuredOnceAndKept) {
  if (!test::kCountsAllocations) GTEST_SKIP() << "sanitized kernels take a minute to measure";
  const test::Scratch scratch;
  setenv("STOWAGE_LINKS", scratch.path("kept/links.json").c_str(), 1);
  bool measured = false;
  const Links first = links_of_this_machine(scratch.path(), false, &measured);
  EXPECT_TRUE(measured);
  EXPECT_GT(first.disk, 1e6);
  EXPECT_GT(first.cached, 1e6);
  EXPECT_GT(first.memcpy, 1e8);
  EXPECT_FALSE(first.key.empty());
  for (const FormatTrait& format : formats()) {
    const FamilyRates rates = first.linear.at(std::string(format.name));
    EXPECT_GT(rates.read, 1e7) << format.name;
    EXPECT_GT(rates.multiply, 1e8) << format.name;
  }
  const Links again = links_of_this_machine(scratch.path(), false, &measured);
  EXPECT_FALSE(measured);
  EXPECT_EQ(to_json(again), to_json(first));
  // A file that is broken, or of another machine, is no answer.
  scratch.write("kept/links.json", "{\"stowage_links\": 1, \"machines\": {\"another\": {}}}");
  links_of_this_machine(scratch.path(), false, &measured);
  EXPECT_TRUE(measured);
  EXPECT_THAT(scratch.read("kept/links.json"), testing::HasSubstr("another"));
  unsetenv("STOWAGE_LINKS");
}

// Every value of the file in turn becomes a value of every other type.
void mistype(nlohmann::json& document, const std::function<void()>& check) {
  for (nlohmann::json& value : document) {
    const nlohmann::json was = value;
    for (const char* other : {"null", "true", "-3", "1.5", "\"text\"", "[]", "[1, {}]", "{}"}) {
      value = nlohmann::json::parse(other);
      check();
    }
    value = was;
    if (value.is_structured()) mistype(value, check);
  }
}

TEST(Links, OfAnotherHandAreAsIfMissing) {
  const test::Scratch scratch;
  const std::string path = scratch.path("links.json");
  Links links{.key = "here", .disk = 0, .cached = 0, .memcpy = 3};
  links.linear["nf4"] = {1, 2};
  links.accelerators["cuda:0"] = {1, 2, 3, true};
  planning::KeptLinks kept(path);
  kept.set_machine("here", links);
  kept.set_disk("here", "254:1", {5, 6});
  kept.keep();
  nlohmann::json good = nlohmann::json::parse(scratch.read("links.json"));
  int illegible = 0;
  mistype(good, [&] {
    scratch.write("links.json", good.dump());
    planning::KeptLinks read(path);
    const auto machine = read.machine("here");
    const auto disk = read.disk("here", "254:1");
    if (!machine || !disk) ++illegible;
    if (!machine) read.set_machine("here", links);
    if (!disk) read.set_disk("here", "254:1", {5, 6});
    read.keep();
    planning::KeptLinks again(path);
    ASSERT_TRUE(again.machine("here").has_value() && again.disk("here", "254:1").has_value())
        << good.dump();
  });
  EXPECT_GT(illegible, 100);
}

TEST(Links, OfAPathThatIsNotThere) {
  EXPECT_STOWAGE_ERROR(links_of_this_machine("/nowhere/at/all"), io, "must be there");
}

TEST(Links, ComeBackFromJson) {
  Links links{.key = "k", .disk = 1.5e9, .cached = 2, .memcpy = 3};
  links.linear["nf4"] = {1, 2};
  links.accelerators["cuda:0"] = {1, 2, 3, true};
  EXPECT_EQ(to_json(links_from_json(to_json(links))), to_json(links));
  EXPECT_STOWAGE_ERROR(links_from_json("{\"key\": \"k\"}"), bad_file, "key 'disk' must be there");
}

TEST(Disk, IsNotMeasuredWithFewerReaders) {
  if (!test::kCountsAllocations) GTEST_SKIP() << "sanitizers have threads of their own";
  const test::Scratch scratch;
  for (const std::int64_t nth : {0, 3}) {
    const test::Shortage shortage(nth, "pthread_create");
    try {
      (void)planning::measure_disk(scratch.path());
      ADD_FAILURE() << "a figure";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::out_of_memory) << error.what();
    }
  }
}

}  // namespace
}  // namespace stowage
