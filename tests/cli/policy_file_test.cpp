// SPDX-License-Identifier: Apache-2.0
// `stowage pack --policy`: what the file says is what the options say.
#include "cli/program.h"

namespace stowage::cli {
namespace {

using testing::HasSubstr;

class PolicyFile : public Program {
 protected:
  PolicyFile() { write_model(path("m.safetensors"), small_model()); }
  void write(const std::string& text) const { write_text(path("policy.json"), text); }
  std::string refusal(const std::string& text) const {
    write(text);
    return expect_failure(2, {"pack", "m.safetensors", "o", "--policy", "policy.json"});
  }
};

TEST_F(PolicyFile, SaysWhatOptionsSay) {
  write(R"({"storage": "nf4", "rules": {"embed": "int8:row", "*": "f8_e4m3"}, "skip": "layers.0",
            "compute_dtype": "bfloat16", "keep_nonfinite": true,
            "exact": true, "measure": false, "working": "block", "blocks": ["layers.?"]})");
  expect_ok({"pack", "m.safetensors", "a.safetensors", "--policy", "policy.json"});
  expect_ok({"pack", "m.safetensors", "b.safetensors", "--storage", "nf4", "--rule",
             "embed=int8:row", "--rule", "*=f8_e4m3", "--skip", "layers.0", "--compute", "bf16",
             "--keep-nonfinite"});
  EXPECT_EQ(read_text(path("a.safetensors")), read_text(path("b.safetensors")));
  const File file = File::open(path("a.safetensors"));
  EXPECT_EQ(to_string(file.find_weight("embed.weight")->storage), "int8:row");
  EXPECT_EQ(file.find("layers.0.linear.weight")->dtype, Dtype::bf16);
}

TEST_F(PolicyFile, RulesKeepTheirOrder) {
  write(R"({"rules": {"emb*": "nf4", "embed": "int8"}})");
  expect_ok({"pack", "m.safetensors", "a.safetensors", "--policy", "policy.json"});
  const File file = File::open(path("a.safetensors"));
  EXPECT_EQ(to_string(file.find_weight("embed.weight")->storage), "nf4:block64");
}

TEST_F(PolicyFile, GlobsThatMatchNothingCanBePermitted) {
  EXPECT_THAT(refusal(R"({"storage": "nf4", "skip": ["*.mpl"]})"), HasSubstr("skip '*.mpl'"));
  write(R"({"storage": "nf4", "skip": ["*.mpl"], "allow_unmatched": true})");
  expect_ok({"pack", "m.safetensors", "a.safetensors", "--policy", "policy.json"});
}

TEST_F(PolicyFile, RefusesWhatItCannotDo) {
  EXPECT_THAT(refusal("[]"), HasSubstr("policy.json: must be the JSON object"));
  EXPECT_THAT(refusal("{"), HasSubstr("policy.json: must be the JSON object"));
  EXPECT_THAT(refusal("{}"), HasSubstr("must have a storage or rules"));
  EXPECT_THAT(refusal(R"({"storage": "nf5"})"), HasSubstr("storage: "));
  EXPECT_THAT(refusal(R"({"storage": ["nf4", "int8"]})"), HasSubstr("must be one storage or null"));
  EXPECT_THAT(refusal(R"({"rules": {"a": 3}})"), HasSubstr("rules['a'] must be one storage"));
  EXPECT_THAT(refusal(R"({"rules": ["a"]})"), HasSubstr("rules must be an object of globs"));
  EXPECT_THAT(refusal(R"({"storage": "nf4", "skip": "auto"})"), HasSubstr("are Python's"));
  EXPECT_THAT(refusal(R"({"storage": "nf4", "skip": [1]})"),
              HasSubstr("skip must be globs, got 1"));
  EXPECT_THAT(refusal(R"({"storage": "nf4", "budget": 9})"), HasSubstr("needs a model that runs"));
  EXPECT_THAT(refusal(R"({"storage": "nf4", "compute_dtype": "int8"})"), HasSubstr("bfloat16"));
  EXPECT_THAT(refusal(R"({"storage": "nf4", "keep_nonfinite": 1})"), HasSubstr("true or false"));
  EXPECT_THAT(refusal(R"({"storge": "nf4"})"), HasSubstr("storge must be an argument"));
  EXPECT_THAT(expect_failure(1, {"pack", "m.safetensors", "o", "--policy", "none.json"}),
              HasSubstr("none.json"));
}

}  // namespace
}  // namespace stowage::cli
