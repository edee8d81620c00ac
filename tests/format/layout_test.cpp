// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "expect_error.h"
#include "stowage/descriptor.h"
#include "stowage/weight.h"

namespace stowage {
namespace {

std::string spell(const Layout& made) {  // "codes U8 [2, 3] 6; scale F32 [2, 1] 8"
  std::string text;
  for (int i = 0; i < made.count; ++i) {
    const Part& part = made.parts[static_cast<std::size_t>(i)];
    text += (i == 0 ? "" : "; ") + std::string(part.name) + " " +
            std::string(disk_name(part.dtype)) + " " + to_string(part.shape) + " " +
            std::to_string(part.bytes);
  }
  return text;
}

struct Row {
  const char* storage;
  Shape shape;
  const char* expected;
};

TEST(Layout, GivesThePartsOfEveryStorage) {
  const std::vector<Row> rows{
      {"f32", {2, 3}, "codes F32 [2, 3] 24"},
      {"bf16", {}, "codes BF16 [] 2"},
      {"f16", {0, 5}, "codes F16 [0, 5] 0"},
      {"f8_e4m3", {2, 3}, "codes U8 [2, 3] 6"},
      {"f8_e5m2:tensor", {2, 3}, "codes U8 [2, 3] 6; scale F32 [] 4"},
      {"int8", {4, 3, 2}, "codes U8 [4, 3, 2] 24; scale F32 [4, 1, 1] 16"},
      {"int8:row2:absmax", {4, 3, 2}, "codes U8 [4, 3, 2] 24; absmax F32 [4, 3, 1] 48"},
      {"int8", {7}, "codes U8 [7] 7; scale F32 [7] 28"},
      {"f8_e4m3:row2", {4, 3, 2}, "codes U8 [4, 3, 2] 24; scale F32 [4, 3, 1] 48"},
      {"int8:block32", {2, 65}, "codes U8 [2, 65] 130; scale F32 [2, 3] 24"},
      {"f8_e4m3:block4", {2, 3, 3}, "codes U8 [2, 3, 3] 18; scale F32 [2, 3] 24"},
      {"int8:block32", {2, 0}, "codes U8 [2, 0] 0; scale F32 [2, 0] 0"},
      {"f8_e4m3:block32:e8m0", {2, 65}, "codes U8 [2, 65] 130; scale U8 [2, 3] 6"},
      {"f8_e4m3:row:bf16", {2, 65}, "codes U8 [2, 65] 130; scale BF16 [2, 1] 4"},
      {"int8:row:bf16:zero", {2, 3}, "codes U8 [2, 3] 6; scale BF16 [2, 1] 4; zero I8 [2, 1] 2"},
      {"f8_e4m3:block128x128", {192, 300}, "codes U8 [192, 300] 57600; scale F32 [2, 3] 24"},
      {"int8:block2x7:e8m0", {3, 8}, "codes U8 [3, 8] 24; scale U8 [2, 2] 4"},
      {"f4_e2m1", {3, 70}, "codes U8 [3, 35] 105; scale F32 [3, 3] 36"},
      {"f4_e2m1:block32:e8m0", {2, 3, 64}, "codes U8 [2, 96] 192; scale U8 [2, 6] 12"},
      {"nvfp4", {3, 70}, "codes U8 [3, 35] 105; scale U8 [3, 5] 15; global_scale F32 [] 4"},
      {"f4_e2m1:block16:e4m3_quotient",
       {3, 70},
       "codes U8 [3, 35] 105; scale U8 [3, 5] 15; global_scale F32 [] 4"},
      {"f4_e2m1:row2", {2, 3, 4}, "codes U8 [2, 6] 12; scale F32 [2, 3, 1] 24"},
      {"f4_e2m1:tensor", {2, 0}, "codes U8 [2, 0] 0; scale F32 [] 4"},
      {"int4", {3, 130}, "codes U8 [3, 65] 195; scale F32 [3, 2] 24"},
      {"int4:block32:bf16:zero",
       {2, 3, 64},
       "codes U8 [2, 96] 192; scale BF16 [2, 6] 24; zero I8 [2, 6] 12"},
      {"int4:block32:bf16:zero:actorder",
       {2, 70},
       "codes U8 [2, 35] 70; scale BF16 [2, 3] 12; zero I8 [2, 3] 6; g_idx I32 [70] 280"},
      {"int8:block32:actorder",
       {2, 33},
       "codes U8 [2, 33] 66; scale F32 [2, 2] 16; g_idx I32 [33] 132"},
      {"uint4:block64:f16:zero_rounded",
       {2, 192},
       "codes U8 [2, 96] 192; scale F16 [2, 3] 12; zero F16 [2, 3] 12"},
      {"int4:tensor:zero", {2, 4}, "codes U8 [2, 2] 4; scale F32 [] 4; zero I8 [] 1"},
      {"nf4", {3, 43}, "codes U8 [65, 1] 65; absmax F32 [3] 12"},
      {"fp4:block32", {64}, "codes U8 [32, 1] 32; absmax F32 [2] 8"},
      {"nf4", {0, 4}, "codes U8 [0, 1] 0; absmax F32 [0] 0"},
      {"nf4:nested",
       {257, 64},
       "codes U8 [8224, 1] 8224; absmax U8 [257] 257; nested_absmax F32 [2] 8; nested_map F32 "
       "[256] 1024; nested_offset F32 [] 4"},
      {"nf4:torchao:bf16",
       {128, 256},
       "codes U8 [16384, 1] 16384; quantized_scalers I8 [512] 512; quantization_factor BF16 [2] 4; "
       "scaler_mean BF16 [] 2; nf4 BF16 [16] 32"},
      {"nf4:torchao:block32:scaler2:f64",
       {64},
       "codes U8 [32, 1] 32; quantized_scalers I8 [2] 2; quantization_factor F64 [1] 8; "
       "scaler_mean F64 [] 8; nf4 F64 [16] 128"},
  };
  for (const Row& row : rows)
    EXPECT_EQ(spell(layout(parse_storage(row.storage), row.shape)), row.expected) << row.storage;
}

TEST(Layout, GivesBlocksToEachMatrixOfAStack) {
  const std::vector<Row> rows{
      {"f8_e4m3:block128x128",
       {2, 192, 300},
       "codes U8 [2, 192, 300] 115200; scale F32 [2, 2, 3] 48"},
      {"int8:block2x8:bf16:zero",
       {2, 3, 8},
       "codes U8 [2, 3, 8] 48; scale BF16 [2, 2, 1] 8; zero I8 [2, 2, 1] 4"},
      {"f4_e2m1:block2x4", {2, 3, 6}, "codes U8 [2, 9] 18; scale F32 [2, 2, 2] 32"},
  };
  for (const Row& row : rows)
    EXPECT_EQ(spell(layout(parse_storage(row.storage), row.shape)), row.expected) << row.storage;
}

TEST(Layout, PutsEightCodesInAsManyBytesAsTheyHaveBits) {
  const std::vector<Row> rows{
      {"int3", {3, 136}, "codes U8 [3, 51] 153; scale F32 [3, 2] 24"},
      {"int2:row2", {2, 3, 8}, "codes U8 [2, 6] 12; scale F32 [2, 3, 1] 24"},
      {"int7:block8x32:f16", {17, 40}, "codes U8 [17, 35] 595; scale F16 [3, 2] 12"},
      {"int5:block32:bf16:zero",
       {2, 3, 64},
       "codes U8 [2, 120] 240; scale BF16 [2, 6] 24; zero I8 [2, 6] 12"},
      {"q6_k", {3, 264}, "codes U8 [3, 198] 594; scale U8 [3, 2, 18] 108"}};
  for (const Row& row : rows)
    EXPECT_EQ(spell(layout(parse_storage(row.storage), row.shape)), row.expected) << row.storage;
  EXPECT_STOWAGE_ERROR(layout(parse_storage("int3"), {3, 132}), invalid_argument,
                       "must have a multiple of 8 elements in each row, got shape [3, 132]");
}

TEST(Layout, AddsUpItsBytes) {
  EXPECT_EQ(layout(parse_storage("int8"), {4, 8}).bytes(), 32 + 16);
  EXPECT_EQ(layout(parse_storage("nf4:nested"), {64}).bytes(), 32 + 1 + 4 + 1024 + 4);
}

TEST(Layout, RefusesShapesThatHaveNoRows) {
  EXPECT_STOWAGE_ERROR(layout(parse_storage("int8:row"), {}), invalid_argument,
                       "layout: a weight stored as int8:row must have at least 1 dimension, got "
                       "shape []");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f8_e4m3:block32"), {}), invalid_argument,
                       "at least 1 dimension");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f8_e4m3:row2"), {8}), invalid_argument,
                       "at least 2 dimensions, got shape [8]");
}

TEST(Layout, RefusesRowsThatWouldBeginInsideOfAByte) {
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f4_e2m1"), {4, 63}), invalid_argument,
                       "layout: a weight stored as f4_e2m1:block32 must have an even number "
                       "of elements in each row, got shape [4, 63]");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f4_e2m1:row2"), {4, 2, 63}), invalid_argument,
                       "an even number of elements in each row, got shape [4, 2, 63]");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f4_e2m1:tensor"), {64}), invalid_argument,
                       "must have at least 2 dimensions, got shape [64]");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f4_e2m1:row2"), {4, 64}), invalid_argument,
                       "must have at least 3 dimensions, got shape [4, 64]");
}

TEST(Layout, RefusesBlocksOfRowsWithoutMatrices) {
  for (const Shape& shape : {Shape{8}, Shape{2, 3, 4, 5}})
    EXPECT_STOWAGE_ERROR(layout(parse_storage("int8:block2x4"), shape), invalid_argument,
                         "layout: a weight stored as int8:block2x4 must have 2 or 3 dimensions, "
                         "got shape " +
                             to_string(shape));
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f4_e2m1:block2x4"), {2, 2, 3}), invalid_argument,
                       "an even number of elements in each row, got shape [2, 2, 3]");
}

TEST(Layout, GivesEachColumnOfSomeRowsItsGroups) {
  const Storage storage = parse_storage("uint4:column4:bf16:zero_rounded");
  EXPECT_EQ(spell(layout(storage, {12, 6})),
            "codes U8 [12, 3] 36; scale BF16 [3, 6] 36; zero BF16 [3, 6] 36");
  EXPECT_EQ(spell(layout(storage, {0, 6})),
            "codes U8 [0, 3] 0; scale BF16 [0, 6] 0; zero BF16 [0, 6] 0");
}

TEST(Layout, RefusesGroupsOfColumnsThatAMatrixDoesNotFill) {
  for (const Shape& shape : {Shape{64}, Shape{96, 64}, Shape{64, 8, 8}, Shape{64, 4, 2, 2}})
    EXPECT_STOWAGE_ERROR(layout(parse_storage("uint4:column64:zero_rounded"), shape),
                         invalid_argument,
                         "layout: a weight stored as uint4:column64:zero_rounded must have 2 "
                         "dimensions, the first a multiple of 64, got shape " +
                             to_string(shape));
  EXPECT_STOWAGE_ERROR(layout(parse_storage("uint4:column64:zero_rounded"), {64, 3}),
                       invalid_argument, "an even number of elements in each row");
}

TEST(Layout, RefusesBytesBeyond64Bits) {
  EXPECT_STOWAGE_ERROR(layout(parse_storage("f32"), {std::int64_t{1} << 60}), invalid_argument,
                       "codes must fit 64-bit sizes");
}

TEST(Layout, RefusesWhatTheParserWould) {
  EXPECT_STOWAGE_ERROR(layout({Codes::nf4, Dialect::standard, {}}, {64}), invalid_argument,
                       "layout: storage: must be one of");
}

TEST(Layout, TorchaoNeedsItsDtypeAndWholeScalerBlocks) {
  EXPECT_STOWAGE_ERROR(layout(parse_storage("nf4:torchao"), {128, 128}), invalid_argument,
                       "must name the dtype of its parts where no values give it: "
                       "nf4:torchao:f32, nf4:torchao:bf16, nf4:torchao:f16 or nf4:torchao:f64");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("nf4:torchao:bf16"), {128, 96}), invalid_argument,
                       "nf4:torchao:bf16 must have at most 2 dimensions and a multiple of 16384 "
                       "elements (block 64 x scaler block 256), got shape [128, 96]");
  EXPECT_STOWAGE_ERROR(layout(parse_storage("nf4:torchao:f32"), {2, 64, 128}), invalid_argument,
                       "got shape [2, 64, 128]");
}

TEST(Layout, HasNumbersOverScalesForRowsOrPairsOfIndices) {
  const std::vector<Row> rows{
      {"nvfp4:row",
       {3, 70},
       "codes U8 [3, 35] 105; scale U8 [3, 5] 15; global_scale F32 [3, 1] 12"},
      {"nvfp4:row2",
       {2, 3, 32},
       "codes U8 [2, 48] 96; scale U8 [2, 6] 12; global_scale F32 [2, 3, 1] 24"}};
  for (const Row& row : rows)
    EXPECT_EQ(spell(layout(parse_storage(row.storage), row.shape)), row.expected) << row.storage;
}

TEST(Layout, RefusesScalesUnderTwoNumbers) {
  for (const Shape& shape : {Shape{2, 3, 24}, Shape{2, 48}})
    EXPECT_STOWAGE_ERROR(layout(parse_storage("nvfp4:row2"), shape), invalid_argument,
                         "nvfp4:row2 must have at least 3 dimensions, and for each pair of indices "
                         "a multiple of 16 elements, got shape " +
                             to_string(shape));
}

TEST(ScalesUnderOne, CountsThoseNextToOneAnother) {
  const Shape shape{4, 3, 32};
  EXPECT_EQ(scales_under_one(parse_storage("nvfp4"), shape), 24);
  EXPECT_EQ(scales_under_one(parse_storage("nvfp4:row"), shape), 6);
  EXPECT_EQ(scales_under_one(parse_storage("nvfp4:row"), {4, 3, 8}), 2);  // one of them short
  EXPECT_EQ(scales_under_one(parse_storage("nvfp4:row2"), shape), 2);
  EXPECT_EQ(scales_under_one(parse_storage("nvfp4:row2"), {4, 3, 4, 8}), 2);
  EXPECT_EQ(scales_under_one(parse_storage("nf4:block64:nested"), {64, 1024}), 256);
  EXPECT_EQ(scales_under_one(parse_storage("nf4:torchao:bf16"), {128, 256}), 256);
}

TEST(GroupElements, CountsWhatSharesAScale) {
  const Shape shape{4, 3, 10};
  EXPECT_EQ(group_elements(parse_storage("f8_e4m3"), shape), 120);
  EXPECT_EQ(group_elements(parse_storage("f8_e4m3:tensor"), shape), 120);
  EXPECT_EQ(group_elements(parse_storage("int8"), shape), 30);
  EXPECT_EQ(group_elements(parse_storage("int8:row2"), shape), 10);
  EXPECT_EQ(group_elements(parse_storage("int8:block16"), shape), 16);
  EXPECT_EQ(group_elements(parse_storage("nf4"), shape), 64);
  EXPECT_EQ(group_elements(parse_storage("uint4:column4:zero_rounded"), {8, 6}), 1);
}

}  // namespace
}  // namespace stowage
