// SPDX-License-Identifier: Apache-2.0
// The page about a plan: whole, without other resources, and safe whatever names a file has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "page/page.h"
#include "plan/planned.h"

namespace stowage::page {
namespace {

using testing::HasSubstr;
using testing::Not;

Plan some_plan(std::vector<PlanUnit> units) {
  return make_plan("a<b>.safetensors", std::move(units),
                   {.ram = 8 << 20, .accelerators = {{"cuda:0", 3 << 20}}}, test::made_links());
}

TEST(PlanPage, IsOnePageWithoutOtherResources) {
  const std::string page = html_of(some_plan(test::language_model(3, 256, 512)));
  EXPECT_TRUE(page.starts_with("<!doctype html>"));
  EXPECT_TRUE(page.ends_with("</html>\n"));
  for (const char* foreign : {"http:", "https:", "<script", "<link", "@import", "url(", "src="})
    EXPECT_THAT(page, Not(HasSubstr(foreign))) << foreign;
  for (const char* part : {"<svg", "Bytes by tier", "Bytes by storage", "prefers-color-scheme"})
    EXPECT_THAT(page, HasSubstr(part));
  EXPECT_THAT(page, Not(HasSubstr("Predicted beside measured")));
}

TEST(PlanPage, ShowsWhatWasMeasuredBesideIt) {
  const Plan plan = some_plan(test::language_model(3, 256, 512));
  const std::string page =
      html_of(plan, {.seconds = plan.seconds * 1.25, .peak = {{"ram", plan.peak.at("ram") / 2}}});
  EXPECT_THAT(page, HasSubstr("Predicted beside measured"));
  EXPECT_THAT(page, HasSubstr("+25.0 %"));
  EXPECT_THAT(page, HasSubstr("-50.0 %"));
}

TEST(PlanPage, EscapesNames) {
  const std::string page =
      html_of(some_plan({test::unit("<script>&\"\n.weight", {64, 64}, "nf4")}));
  EXPECT_THAT(page, Not(HasSubstr("<script>")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;&amp;&quot;\\x0a.weight"));
  EXPECT_THAT(page, HasSubstr("a&lt;b&gt;.safetensors"));
}

TEST(PlanPage, OfOneUnitAndOfNone) {
  EXPECT_THAT(html_of(some_plan({test::unit("w.weight", {64, 64})})), HasSubstr("<svg"));
  EXPECT_THAT(html_of(some_plan({})), HasSubstr("0 weights"));
}

TEST(PlanPage, PicturesExpertsByLayer) {
  const Plan plan =
      make_plan("m", test::mixture(3, 16), {.ram = 9 << 20, .routed = 2}, test::made_links());
  const std::string page = html_of(plan), text = to_text(plan);
  EXPECT_THAT(page, HasSubstr("Experts by layer"));
  EXPECT_THAT(page, HasSubstr("expert 15</text>"));
  EXPECT_THAT(page, Not(HasSubstr("experts.3.up_proj"))) << "not a row of a table for each";
  EXPECT_THAT(text, HasSubstr("model.layers.2.mlp.experts"));
  EXPECT_THAT(text, HasSubstr("of their uses find them in memory"));
  EXPECT_THAT(text, Not(HasSubstr("experts.3.up_proj")));
  const Plan dense =
      make_plan("m", test::language_model(1, 64, 64), {.ram = 1 << 20}, test::made_links());
  EXPECT_THAT(html_of(dense), Not(HasSubstr("Experts by layer")));
}

}  // namespace
}  // namespace stowage::page
