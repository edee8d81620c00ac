// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "expect_error.h"
#include "plan/planned.h"

namespace stowage {
namespace {

using nlohmann::json;

Plan some_plan() {
  return make_plan("m", test::language_model(3, 256, 512),
                   {.ram = 4 << 20, .accelerators = {{"cuda:0", 3 << 20}}, .activations = 5},
                   test::made_links());
}

TEST(PlanJson, ComesBackAsItWas) {
  const Plan plan = some_plan();
  const std::string text = to_json(plan);
  EXPECT_EQ(to_json(plan_from_json(text)), text);
}

TEST(PlanJson, HasTheKeysThatReadersRelyOn) {
  const json shown = json::parse(to_json(some_plan()));
  EXPECT_EQ(shown["stowage_plan"], 1);
  for (const char* key : {"name", "weights", "bytes", "fingerprint"})
    EXPECT_TRUE(shown["model"].contains(key)) << key;
  for (const char* key : {"key", "links"}) EXPECT_TRUE(shown["machine"].contains(key)) << key;
  EXPECT_EQ(shown["limits"]["ram"], 4 << 20);
  EXPECT_EQ(shown["limits"]["accelerators"]["cuda:0"], 3 << 20);
  for (const char* key :
       {"name", "bytes", "storage", "tier", "work", "uses", "rows", "seconds", "why"})
    EXPECT_TRUE(shown["units"][0].contains(key)) << key;
  for (const char* key : {"ring", "tile", "activations"}) EXPECT_TRUE(shown.contains(key)) << key;
  for (const char* key : {"seconds", "peak", "bytes", "over_the_pass"})
    EXPECT_TRUE(shown["predicted"].contains(key)) << key;
  EXPECT_EQ(shown["predicted"]["over_the_pass"][0].size(), 3u);
}

TEST(PlanJson, RefusesWhatIsNoPlan) {
  const std::string text = to_json(some_plan());
  const auto changed = [&](const std::function<void(json&)>& change) {
    json shown = json::parse(text);
    change(shown);
    return plan_from_json(shown.dump(), "p.json");
  };
  const auto refused = [&](const std::string& why, const std::function<void(json&)>& change) {
    EXPECT_STOWAGE_ERROR(changed(change), bad_file, why);
  };
  refused("p.json: key 'stowage_plan' must be 1, got 2", [](json& j) { j["stowage_plan"] = 2; });
  refused("p.json: key 'stowage_plan' must be there", [](json& j) { j.erase("stowage_plan"); });
  refused("p.json: key 'units' must be there", [](json& j) { j.erase("units"); });
  refused("p.json: unit 1: key 'bytes' must be a whole number, got -1",
          [](json& j) { j["units"][1]["bytes"] = -1; });
  refused("p.json: unit 0: key 'tier' must be text", [](json& j) { j["units"][0]["tier"] = 3; });
  refused("'predicted': key 'seconds' must be a number",
          [](json& j) { j["predicted"]["seconds"] = nullptr; });
  refused("must name units of the plan",
          [](json& j) { j["predicted"]["over_the_pass"][0][0] = 999; });
  for (const char* key : {"stowage_plan", "model", "machine", "limits", "rows", "units", "ring",
                          "tiles", "activations", "predicted"})
    refused("must be there", [&](json& j) { j.erase(key); });
}

TEST(PlanJson, LeavesKeysOfLaterVersionsAlone) {
  json shown = json::parse(to_json(some_plan()));
  shown["later"] = {1, 2};
  shown["units"][0]["later"] = true;
  EXPECT_EQ(plan_from_json(shown.dump()).units.size(), shown["units"].size());
}

TEST(PlanJson, RefusesBrokenText) {
  for (const char* text : {"", "[]", "{", "{\"stowage_plan\": 1, \"stowage_plan\": 1}", "nonsense"})
    EXPECT_THROW(plan_from_json(text), Error) << text;
  std::string text = to_json(some_plan());
  for (std::size_t cut = 0; cut < text.size(); cut += 997)
    EXPECT_THROW(plan_from_json(std::string_view(text).substr(0, cut)), Error) << cut;
}

}  // namespace
}  // namespace stowage
