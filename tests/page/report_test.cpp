// SPDX-License-Identifier: Apache-2.0
// A report for people: the page and the text show the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "page/page.h"
#include "plan/planned.h"

namespace stowage::page {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(ReportPage, TextAndPageShowTheSame) {
  Report report = test::made_report();
  report.notes = {"fp8 & more"};
  const std::string text = text_of(report), page = html_of(report);
  for (const char* part :
       {"nf4:block64", "convolution", "lm_head.weight", "[8, 3, 4, 4]", "0.281"}) {
    EXPECT_THAT(text, HasSubstr(part));
    EXPECT_THAT(page, HasSubstr(part));
  }
  EXPECT_THAT(text, HasSubstr("fp8 & more"));
  EXPECT_THAT(page, HasSubstr("fp8 &amp; more"));
  EXPECT_THAT(page, HasSubstr("a&lt;b&gt;"));
  for (const char* unknown : {"relative", "Bytes by tier", "Predicted"})
    EXPECT_THAT(page, Not(HasSubstr(unknown)));
  for (const char* foreign : {"http:", "https:", "<script", "<link", "@import", "url(", "src="})
    EXPECT_THAT(page, Not(HasSubstr(foreign))) << foreign;
}

TEST(ReportPage, WithAPlanShowsTiersAndThePass) {
  const std::vector<PlanUnit> units = test::language_model(3, 256, 512);
  const Plan plan = make_plan("m", units, {.ram = 4 << 20}, test::made_links());
  Report report{.model = "m"};
  for (const PlanUnit& unit : plan.units)
    report.weights.push_back(
        {.name = unit.name, .storage = unit.storage, .shape = unit.shape, .bytes = unit.rest});
  place(report, plan);
  EXPECT_EQ(report.weights[0].tier, plan.units[0].tier);
  const PlanMeasured measured{.seconds = 2 * plan.seconds, .peak = {{"ram", 4 << 20}}};
  const std::string page = html_of(report, &plan, measured);
  for (const char* part : {"Bytes by tier", "Memory over the pass", "Predicted beside measured",
                           "+100.0 %", "<svg", "not measured"})
    EXPECT_THAT(page, HasSubstr(part));
  const std::string text = text_of(report, &plan, measured);
  for (const char* part : {"(+100 %)", "measured peak of ram: 4.00 MiB", "predicted peak of ram"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(html_of(report, nullptr, measured), HasSubstr("peak of ram, measured"));
}

}  // namespace
}  // namespace stowage::page
