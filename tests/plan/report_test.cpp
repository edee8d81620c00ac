// SPDX-License-Identifier: Apache-2.0
// What a model is made of: kinds, sizes, and JSON.
#include "stowage/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "expect_error.h"
#include "plan/planned.h"

namespace stowage {
namespace {

TEST(Report, KnowsKindsAndSizesInBf16) {
  std::vector<std::string> kinds;
  std::vector<std::uint64_t> bytes;
  for (const ReportWeight& weight : test::made_report().weights) {
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
  Report report = test::made_report();
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
