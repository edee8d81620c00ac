// SPDX-License-Identifier: Apache-2.0
// `stowage inspect --compare`: bytes and errors are those that packing would give.
#include "cli/compare.h"

#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr const char* kStorages = "nf4,nf4:block64:nested,int8:row,f8_e4m3:row";

TEST_F(Program, CompareShowsWhatPackingWouldGive) {
  write_model(path("m.safetensors"), small_model());
  const json shown =
      json::parse(expect_ok({"inspect", "m.safetensors", "--compare", kStorages, "--json"}));
  EXPECT_EQ(shown["files"], json({"m.safetensors"}));
  ASSERT_EQ(shown["weights"].size(), 2u);
  EXPECT_EQ(shown["not_compared"].size(), 5u);
  ASSERT_EQ(shown["storages"].size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const std::string storage = shown["storages"][i]["storage"];
    const std::string out = "p" + std::to_string(i) + ".safetensors";
    const json packed =
        json::parse(expect_ok({"pack", "m.safetensors", out, "--storage", storage, "--json"}));
    for (std::size_t w = 0; w < 2; ++w) {
      const json& cell = shown["weights"][w]["compared"][i];
      EXPECT_EQ(cell["storage"], storage);
      EXPECT_EQ(shown["weights"][w]["name"], packed["weights"][w]["name"]);
      for (const char* key : {"elements", "max_error", "rms_error", "relative_error", "saturated",
                              "worst_block_error", "worst_block"})
        EXPECT_EQ(cell[key], packed["weights"][w][key]) << key;
    }
    for (const char* key : {"max_error", "relative_error", "worst", "worst_block_error",
                            "worst_block", "worst_block_of"})
      EXPECT_EQ(shown["storages"][i][key], packed["total"][key]) << key;
  }
}

TEST_F(Program, CompareAsATable) {
  write_model(path("m.safetensors"), small_model());
  const std::string shown = expect_ok({"inspect", "m.safetensors", "--compare", "nf4,int8:row"});
  EXPECT_THAT(shown, HasSubstr("2 weights that would rest, 5 tensors that stay plain"));
  EXPECT_THAT(
      shown,
      HasSubstr(
          "weight                  shape        bytes  nf4:block64   error  int8:row    error"));
  EXPECT_THAT(shown, HasSubstr("layers.0.linear.weight  [16, 64]  4.00 KiB        576 B"));
  EXPECT_THAT(shown, HasSubstr("all of them"));
  EXPECT_THAT(shown, HasSubstr("int8:row: worst "));
  EXPECT_THAT(shown, HasSubstr("int8:row: worst block: relative "));
}

TEST_F(Program, CompareSaysWhyAWeightCannotRest) {
  std::vector<float> values = some_values(16 * 64, 2);
  values[5] = std::numeric_limits<float>::quiet_NaN();
  write_model(path("m.safetensors"), {f32_tensor("a.weight", {16, 64}, values)});
  const json shown =
      json::parse(expect_ok({"inspect", "m.safetensors", "--compare", "nf4,int8", "--json"}));
  const json& cells = shown["weights"][0]["compared"];
  EXPECT_EQ(cells[0]["nonfinite"], 64);  // the block of the NaN
  EXPECT_THAT(cells[1]["reason"].get<std::string>(), HasSubstr("finite"));
  EXPECT_EQ(shown["storages"][1]["refused"], 1);
  EXPECT_THAT(expect_ok({"inspect", "m.safetensors", "--compare", "nf4,int8"}),
              HasSubstr("int8:row: cannot hold 1 of the weights"));
}

TEST_F(Program, CompareRefusesWhatIsNoStorage) {
  write_model(path("m.safetensors"), small_model());
  for (const char* wrong : {"nf5", "nf4,", "", "nf4,nf4:row"})
    EXPECT_THAT(expect_failure(2, {"inspect", "m.safetensors", "--compare", wrong}),
                HasSubstr("storage"))
        << wrong;
  EXPECT_THAT(expect_failure(1, {"inspect", "none.safetensors", "--compare", "nf4"}),
              HasSubstr("none.safetensors"));
}

TEST(Compare, StoragesAreSeparatedByCommas) {
  const std::vector<Storage> storages = parse_storages("nf4,f8_e4m3:row");
  ASSERT_EQ(storages.size(), 2u);
  EXPECT_EQ(to_string(storages[0]), "nf4:block64");
  EXPECT_EQ(to_string(storages[1]), "f8_e4m3:row");
}

}  // namespace
}  // namespace stowage::cli
