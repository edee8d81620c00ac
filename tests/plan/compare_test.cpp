// SPDX-License-Identifier: Apache-2.0
// What is said of a plan beside the pass that was measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "expect_error.h"
#include "plan/planned.h"

namespace stowage {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// Links and limits of which every figure below follows: 2 s, of which 1.2 s are work.
Plan made_plan() {
  Plan plan{.model = "m", .fingerprint = ""};
  plan.links.disk = 1e9;
  plan.seconds = 2;
  plan.units.push_back({.name = "a", .storage = "nf4", .seconds = 1.2});
  plan.moved["disk->ram"] = 1'500'000'000;
  plan.peak["ram"] = 1 << 30;
  return plan;
}

PlanMeasured took(double seconds, std::optional<double> stall = {}) {
  return {.seconds = seconds, .moved = {{"disk->ram", 1'500'000'000}}, .stall = stall};
}

TEST(PlanCompare, OfWhatIsNearSaysNoMore) {
  EXPECT_EQ(compare(made_plan(), took(2.2)), "predicted 2.00 s, measured 2.20 s (+10 %)");
  EXPECT_EQ(compare(made_plan(), took(1.8, 0.1)), "predicted 2.00 s, measured 1.80 s (-10 %)");
}

TEST(PlanCompare, NamesTheWaits) {
  EXPECT_EQ(compare(made_plan(), took(4, 2.7)),
            "predicted 2.00 s, measured 4.00 s (+100 %): waits for weights took 2.70 s, planned "
            "800.00 ms; the disk gave 0.38 GB/s, planned 1.00 GB/s");
}

TEST(PlanCompare, NamesTheWork) {
  EXPECT_THAT(compare(made_plan(), took(4, 0.9)),
              HasSubstr("(+100 %): work took 3.10 s, planned 1.20 s; attention, norms"));
  EXPECT_THAT(compare(made_plan(), took(1.55, 0.8)),
              testing::EndsWith("(-22 %): work took 750.00 ms, planned 1.20 s"));
}

TEST(PlanCompare, NamesThePageCache) {
  EXPECT_THAT(compare(made_plan(), took(1.21, 0.1)),
              HasSubstr("the disk gave 1.24 GB/s, planned 1.00 GB/s; the file lies in the page"));
}

TEST(PlanCompare, NamesALinkThatCarriedMore) {
  PlanMeasured measured = took(4, 1);
  measured.moved["disk->ram"] = std::uint64_t{3} << 30;
  EXPECT_THAT(compare(made_plan(), measured),
              HasSubstr("disk->ram carried 3.00 GiB in a pass, planned 1.40 GiB"));
}

TEST(PlanCompare, NamesAPeakThatIsFarOff) {
  PlanMeasured measured = took(2);
  measured.peak = {{"ram", 1 << 30}};
  EXPECT_THAT(compare(made_plan(), measured), Not(HasSubstr("peak")));
  measured.peak["ram"] = std::uint64_t{3} << 29;
  EXPECT_THAT(compare(made_plan(), measured),
              testing::EndsWith("; peak of ram 1.50 GiB, predicted 1.00 GiB (+50 %)"));
}

TEST(PlanCompare, SaysWhatWasNotMeasured) {
  EXPECT_THAT(compare(made_plan(), {.seconds = 4, .moved = made_plan().moved}),
              HasSubstr("how long the work waited was not measured"));
  EXPECT_STOWAGE_ERROR(compare(made_plan(), {}), invalid_argument,
                       "seconds of a pass must be above 0, got 0");
}

TEST(PlanMeasured, ComesFromJson) {
  const PlanMeasured read = measured_from_json(
      R"({"seconds": 1.5, "peak": {"ram": 7}, "bytes": {"disk->ram": 9}, "stall": 0, "more": []})");
  EXPECT_EQ(read.seconds, 1.5);
  EXPECT_EQ(read.peak, (BytesByName{{"ram", 7}}));
  EXPECT_EQ(read.moved, (BytesByName{{"disk->ram", 9}}));
  EXPECT_EQ(read.stall, 0);
  EXPECT_FALSE(measured_from_json("{}").stall);
  EXPECT_STOWAGE_ERROR(measured_from_json(R"({"seconds": "1"})", "m.json"), bad_file,
                       "m.json: key 'seconds' must be a number of at least 0");
}

}  // namespace
}  // namespace stowage
