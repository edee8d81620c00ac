// SPDX-License-Identifier: Apache-2.0
// The table of docs/formats.md, row by row.
#include <gmock/gmock.h>

#include "expect_error.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

using testing::ElementsAre;

std::vector<std::string> lines(const char* storage, const Shape& shape) {
  std::vector<std::string> made;
  for (const Declaration& d : disk_layout("w", parse_storage(storage), shape)) {
    made.push_back(d.name + " " + std::string(disk_name(d.dtype)) + " " + to_string(d.shape));
  }
  return made;
}

TEST(DiskLayout, CastsAreOneTensor) {
  EXPECT_THAT(lines("f32", {}), ElementsAre("w F32 []"));
  EXPECT_THAT(lines("bf16", {2, 3}), ElementsAre("w BF16 [2, 3]"));
  EXPECT_THAT(lines("f8_e5m2", {2, 3}), ElementsAre("w F8_E5M2 [2, 3]"));
}

TEST(DiskLayout, ScaledCodesHaveAScaleBesideThem) {
  EXPECT_THAT(lines("f8_e4m3:tensor", {2, 3}), ElementsAre("w F8_E4M3 [2, 3]", "w_scale F32 []"));
  EXPECT_THAT(lines("int8", {4, 3, 2}), ElementsAre("w I8 [4, 3, 2]", "w_scale F32 [4, 1, 1]"));
  EXPECT_THAT(lines("int8:row2", {4, 3, 2}),
              ElementsAre("w I8 [4, 3, 2]", "w_scale F32 [4, 3, 1]"));
  EXPECT_THAT(lines("int8:block4", {2, 9}), ElementsAre("w I8 [2, 9]", "w_scale F32 [2, 3]"));
}

TEST(DiskLayout, FourBitWeightsAreAsBitsandbytesKeepsThem) {
  EXPECT_THAT(lines("nf4", {5, 13}),
              ElementsAre("w U8 [33, 1]", "w.absmax F32 [2]",
                          "w.quant_state.bitsandbytes__nf4 U8 [77]", "w.quant_map F32 [16]"));
  EXPECT_THAT(lines("fp4:nested", {5, 13}),
              ElementsAre("w U8 [33, 1]", "w.absmax U8 [2]", "w.nested_absmax F32 [1]",
                          "w.nested_quant_map F32 [256]",
                          "w.quant_state.bitsandbytes__fp4 U8 [172]", "w.quant_map F32 [16]"));
}

TEST(DiskLayout, TorchaoIsItsPartsUnderTheNamesOfThePeer) {
  EXPECT_THAT(
      lines("nf4:torchao:bf16", {128, 256}),
      ElementsAre("w U8 [16384, 1]", "w.quantized_scalers I8 [512]",
                  "w.quantization_factor BF16 [2]", "w.scaler_mean BF16 []", "w.nf4 BF16 [16]"));
}

TEST(DiskLayout, RefusesWhatLayoutRefuses) {
  EXPECT_STOWAGE_ERROR(disk_layout("w", parse_storage("int8"), {}), invalid_argument, "dimension");
  EXPECT_STOWAGE_ERROR(disk_layout("w", parse_storage("nf4:torchao"), {128, 128}), invalid_argument,
                       "must name the dtype");
}

}  // namespace
}  // namespace stowage
