// SPDX-License-Identifier: Apache-2.0
#include "store/manifest.h"

#include <gmock/gmock.h>

#include "expect_error.h"

namespace stowage {
namespace {

Manifest example() {
  Manifest manifest;
  manifest.set = "00000000000000ff";
  manifest.weights["b\"q"] = {parse_storage("nf4:nested"), {8, 64}, Dtype::bf16};
  manifest.weights["a"] = {parse_storage("f32"), {}, {}};
  manifest.checksums["a"] = 0x0123456789abcdefULL;
  return manifest;
}

TEST(Manifest, TextIsOrderedAndComesBack) {
  const std::string text = manifest_text(example());
  EXPECT_EQ(text,
            R"({"version":1,"set":"00000000000000ff","weights":{"a":{"storage":"f32","shape":[]},)"
            R"("b\"q":{"storage":"nf4:block64:nested","shape":[8,64],"compute":"bf16"}},)"
            R"("xxh3":{"a":"0123456789abcdef"}})");
  const Manifest back = parse_manifest({"f", "", {}}, text);
  EXPECT_EQ(manifest_text(back), text);
  EXPECT_EQ(back.checksums.at("a"), 0x0123456789abcdefULL);
  EXPECT_EQ(back.weights.at("b\"q").compute, Dtype::bf16);
}

TEST(Manifest, AnEmptyOneIsLegal) {
  const Manifest none = parse_manifest({"f", "", {}}, R"({"version":1})");
  EXPECT_TRUE(none.weights.empty());
  EXPECT_TRUE(none.checksums.empty());
}

TEST(Manifest, HexHasSixteenLowerCaseDigits) {
  EXPECT_EQ(hex(0), "0000000000000000");
  EXPECT_EQ(hex(~0ULL), "ffffffffffffffff");
  EXPECT_EQ(from_hex("00000000000000ff"), 255U);
  for (const char* bad : {"", "ff", "0x000000000000ff", "000000000000000g", "-000000000000001",
                          "00000000000000ff0"}) {
    EXPECT_FALSE(from_hex(bad)) << bad;
  }
}

TEST(Manifest, ComputeNamesAreThoseOfValueDtypes) {
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
    EXPECT_EQ(compute_from_name(compute_name(dtype)), dtype);
  }
  EXPECT_FALSE(compute_from_name("BF16"));
  EXPECT_STOWAGE_ERROR(compute_name(Dtype::i8), invalid_argument, "got I8");
}

}  // namespace
}  // namespace stowage
