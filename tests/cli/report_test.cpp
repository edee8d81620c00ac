// SPDX-License-Identifier: Apache-2.0
// `stowage report`.
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "stowage/plan.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

class ReportProgram : public Program {
 protected:
  ReportProgram() { write_model(path("m.safetensors"), small_model()); }

  void write_plan(const std::string& model) const {
    Links links{.key = "a machine", .disk = 2e9, .memcpy = 1e10};
    links.linear["f32"] = {5e9, 1e11};
    const File file = File::open(path(model));
    write_text(path("plan.json"), to_json(make_plan(file, {.ram = 1 << 20}, links)));
  }
};

TEST_F(ReportProgram, ShowsBytesByStorageAndKind) {
  const std::string shown = expect_ok({"report", "m.safetensors"});
  for (const char* word : {"m.safetensors: 7 weights", "embedding", "embed.weight", "f32"})
    EXPECT_THAT(shown, HasSubstr(word));
  EXPECT_THAT(shown, Not(HasSubstr("tier")));
}

TEST_F(ReportProgram, JsonHasEverySum) {
  const json shown = json::parse(expect_ok({"report", "m.safetensors", "--json"}));
  EXPECT_EQ(shown["stowage_report"], 1);
  std::uint64_t bytes = 0;
  for (const json& weight : shown["weights"]) bytes += weight["bytes"].get<std::uint64_t>();
  EXPECT_EQ(shown["bytes"], bytes);
}

TEST_F(ReportProgram, ShowsThePlanAndWhatWasMeasured) {
  write_plan("m.safetensors");
  write_text(path("measured.json"), R"({"seconds": 100, "peak": {"ram": 5}, "stall": 1})");
  const std::string shown = expect_ok({"report", "m.safetensors", "--plan", "plan.json",
                                       "--measured", "measured.json", "--html", "r.html"});
  EXPECT_THAT(shown, HasSubstr("measured 100.00 s"));
  const std::string page = read_text(path("r.html"));
  for (const char* part : {"<h1>Report of m.safetensors</h1>", "Predicted beside measured",
                           "Memory over the pass", "Bytes by tier"})
    EXPECT_THAT(page, HasSubstr(part));
}

TEST_F(ReportProgram, RefusesInOneLine) {
  write_plan("m.safetensors");
  expect_ok({"pack", "m.safetensors", "packed.safetensors", "--storage", "int8"});
  EXPECT_THAT(expect_failure(1, {"report", "packed.safetensors", "--plan", "plan.json"}),
              HasSubstr("must be made for the weights of packed.safetensors"));
  EXPECT_THAT(expect_failure(1, {"report", "m.safetensors", "--plan", "none.json"}),
              HasSubstr("none.json: must be readable"));
  EXPECT_THAT(expect_failure(1, {"report", "m.safetensors", "--plan", "m.safetensors"}),
              HasSubstr("m.safetensors: "));
  EXPECT_THAT(expect_failure(1, {"report", "none.safetensors"}), HasSubstr("none.safetensors"));
  EXPECT_THAT(expect_failure(2, {"report"}), HasSubstr("MODEL"));
}

}  // namespace
}  // namespace stowage::cli
