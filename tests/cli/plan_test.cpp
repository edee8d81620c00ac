// SPDX-License-Identifier: Apache-2.0
// `stowage plan` and `stowage bench --links`.
#include <fstream>
#include <nlohmann/json.hpp>

#include "allocations.h"
#include "cli/program.h"
#include "plan/links.h"
#include "stowage/plan.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

/// The program with the rates of this machine made up, as if they had been measured.
class PlanProgram : public Program {
 protected:
  PlanProgram() {
    write_model(path("m.safetensors"), small_model());
    Links links{.key = machine_key(), .memcpy = 1e10};
    links.linear["f32"] = {5e9, 1e11};
    const json machine{
        {"links", planning::links_json(links)},
        {"disks", {{planning::disk_key(path("m.safetensors")), {{"disk", 2e9}, {"cached", 6e9}}}}}};
    write_text(path("links.json"),
               json{{"stowage_links", 1}, {"machines", {{links.key, machine}}}}.dump());
    setenv("STOWAGE_LINKS", path("links.json").c_str(), 1);
  }
  ~PlanProgram() override { unsetenv("STOWAGE_LINKS"); }
};

TEST_F(PlanProgram, ShowsWhichWhyAndHowLong) {
  const std::string shown = expect_ok({"plan", "m.safetensors", "--ram", "1MiB"});
  for (const char* word : {"m.safetensors: 7 weights", "limits     ram 1.00 MiB", "predicted",
                           "embed.weight", "plain and small: stays in memory"})
    EXPECT_THAT(shown, HasSubstr(word));
}

TEST_F(PlanProgram, JsonIsThePlanThatIsWritten) {
  const std::string shown =
      expect_ok({"plan", "m.safetensors", "--ram", "1MiB", "--accelerator", "1MiB", "--accelerator",
                 "cuda:1=2MiB", "--storage", "nf4", "--rows", "16", "--json", "-o", "plan.json"});
  EXPECT_EQ(read_text(path("plan.json")), shown);
  const Plan plan = plan_from_json(shown);
  EXPECT_EQ(plan.model, "m.safetensors");
  EXPECT_EQ(plan.storage, "nf4:block64");
  EXPECT_EQ(plan.rows, 16);
  EXPECT_EQ(plan.accelerators.size(), 2u);
  EXPECT_EQ(plan.links.disk, 2e9);
  EXPECT_EQ(json::parse(shown)["limits"]["accelerators"]["cuda:1"], 2 << 20);
}

TEST_F(PlanProgram, WritesAPage) {
  expect_ok({"plan", "m.safetensors", "--ram", "1MiB", "--html", "plan.html"});
  const std::string page = read_text(path("plan.html"));
  EXPECT_THAT(page, HasSubstr("<h1>Plan of m.safetensors</h1>"));
  EXPECT_THAT(page, HasSubstr("Memory over the pass"));
}

TEST_F(PlanProgram, RefusesInOneLine) {
  EXPECT_THAT(expect_failure(1, {"plan", "m.safetensors", "--ram", "4KiB"}),
              HasSubstr("plan: ram must be at least"));
  EXPECT_THAT(expect_failure(2, {"plan", "m.safetensors", "--ram", "much"}), HasSubstr("size:"));
  EXPECT_THAT(expect_failure(2, {"plan", "m.safetensors"}), HasSubstr("--ram"));
  EXPECT_THAT(expect_failure(2, {"plan", "m.safetensors", "--ram", "1MiB", "--storage", "nf5"}),
              HasSubstr("nf5"));
  EXPECT_THAT(expect_failure(2, {"plan", "m.safetensors", "--ram", "1MiB", "--uses", "x"}),
              HasSubstr("--uses: must be GLOB=NUMBER"));
  std::ofstream(path("u.json"))
      << R"({"stowage_uses": 1, "weights": {"layers.0.experts.w": {"by_index": [1, 2]}}})";
  EXPECT_THAT(expect_failure(2, {"plan", "m.safetensors", "--ram", "1MiB", "--uses", path("u.json"),
                                 "--uses", path("u.json")}),
              HasSubstr("--uses: must name one file"));
  EXPECT_THAT(
      expect_failure(1, {"plan", "m.safetensors", "--ram", "1MiB", "--uses", path("u.json")}),
      HasSubstr("must be of a model that has some"));
  EXPECT_THAT(expect_failure(1, {"plan", "none.safetensors", "--ram", "1MiB"}),
              HasSubstr("none.safetensors"));
}

TEST_F(PlanProgram, MeasuresTheMachineOnceAndSaysSo) {
  if (!test::kCountsAllocations) GTEST_SKIP() << "sanitized kernels take a minute to measure";
  fs::remove(path("links.json"));
  const Result first = run({"plan", "m.safetensors", "--ram", "1MiB"});
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.err, HasSubstr("measured this machine once, kept in "));
  expect_ok({"plan", "m.safetensors", "--ram", "1MiB"});
}

TEST_F(PlanProgram, BenchMeasuresLinksAnew) {
  if (!test::kCountsAllocations) GTEST_SKIP() << "sanitized kernels take a minute to measure";
  const json shown = json::parse(expect_ok({"bench", "--links", "--json", "m.safetensors"}));
  EXPECT_NE(shown["disk"], 2e9);
  EXPECT_TRUE(shown["linear"].contains("nf4"));
  EXPECT_THAT(read_text(path("links.json")), HasSubstr("\"nf4\""));
}

}  // namespace
}  // namespace stowage::cli
