// SPDX-License-Identifier: Apache-2.0
// What a model is made of: kinds, sizes, and JSON.
#include "stowage/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "expect_error.h"
#include "plan/planned.h"

namespace stowage {
namespace {

Report made_report() {
  Report report{.model = "a<b>"};
  report.weights = {
      {.name = "embed_tokens.weight", .storage = "bf16", .shape = {64, 32}, .bytes = 4096},
      {.name = "layers.0.weight", .storage = "nf4:block64", .shape = {64, 64}, .bytes = 2304},
      {.name = "lm_head.weight", .storage = "int8:row", .shape = {64, 32}, .bytes = 2304},
      {.name = "norm.weight", .storage = "f32", .shape = {64}, .bytes = 256},
      {.name = "patch.weight", .storage = "f16", .shape = {8, 3, 4, 4}, .bytes = 768},
      {.name = "steps", .storage = "I64", .shape = {1}, .bytes = 8}};
  return report;
}

TEST(Report, KnowsKindsAndSizesInBf16) {
  std::vector<std::string> kinds;
  std::vector<std::uint64_t> bytes;
  for (const ReportWeight& weight : made_report().weights) {
    kinds.push_back(kind_of(weight));
    bytes.push_back(bytes_in_bf16(weight));
  }
  EXPECT_EQ(kinds, (std::vector<std::string>{"embedding", "matrix", "head", "vector", "convolution",
                                             "other"}));
  EXPECT_EQ(bytes, (std::vector<std::uint64_t>{4096, 8192, 4096, 128, 768, 8}));
}

TEST(Report, OfAFileIsItsHeader) {
  const test::Scratch scratch;
  const std::string path = test::write_headers(scratch, test::language_model(2, 64, 128));
  const Report report = report_of(File::open(path), "mine");
  EXPECT_EQ(report.model, "mine");
  ASSERT_EQ(report.weights.size(), 18u);
  EXPECT_EQ(kind_of(report.weights.front()), "head");
  for (const ReportWeight& weight : report.weights) {
    EXPECT_EQ(weight.bytes, bytes_in_bf16(weight)) << weight.name;
    EXPECT_EQ(weight.tier, "");
  }
}

TEST(Report, JsonComesBackAsItWas) {
  Report report = made_report();
  report.weights[1].tier = "disk";
  report.weights[1].relative_error = 0.0625;
  report.notes = {"a line"};
  const std::string text = to_json(report);
  EXPECT_EQ(to_json(report_from_json(text)), text);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["bytes"], 4096 + 2304 + 2304 + 256 + 768 + 8);
  EXPECT_EQ(json["kinds"]["head"], 2304);
  EXPECT_EQ(json["storages"]["nf4:block64"], 2304);
  EXPECT_EQ(json["weights"][0]["tier"], nullptr);
  for (const char* broken : {"{}", R"({"stowage_report": 2})", R"({"stowage_report": 1})"})
    EXPECT_THROW(report_from_json(broken), Error) << broken;
}

}  // namespace
}  // namespace stowage
