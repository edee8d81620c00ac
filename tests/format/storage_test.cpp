// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <vector>

#include "expect_error.h"
#include "format/legal.h"

namespace stowage {
namespace {

using Kind = Scaling::Kind;

// Every legal storage, with a few block sizes each.
std::vector<Storage> all_legal() {
  std::vector<Storage> found;
  for (int codes = 0; codes < kCodesCount; ++codes)
    for (int dialect = 0; dialect < 2; ++dialect)
      for (int kind = 0; kind <= static_cast<int>(Kind::column); ++kind)
        for (const int block : {0, 1, 2, 32, 48, 64, 128, 4096, 8192, kMaxBlock, kMaxBlock + 1})
          for (const bool nested : {false, true})
            for (int type = 0; type <= static_cast<int>(ScaleType::absmax); ++type)
              for (const int scaler : {0, 1, 3, 256, 4096, 8192})
                for (const int rows : {0, 1, 2, 3, 4096, 8192})
                  for (const int more : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}) {
                    Storage storage{static_cast<Codes>(codes),
                                    static_cast<Dialect>(dialect),
                                    {static_cast<Kind>(kind), block, nested,
                                     static_cast<ScaleType>(type), scaler, rows}};
                    if (more < 10) {
                      storage.scaling.zero = static_cast<Zero>(more % 5);
                      storage.scaling.actorder = more >= 5;
                    } else {
                      storage.scaling.outer = more == 10 ? Kind::row : Kind::row2;
                    }
                    if (is_legal(storage)) found.push_back(storage);
                  }
  return found;
}

TEST(Storage, StringsAndKeysAreReadBack) {
  const auto storages = all_legal();
  // Without scales 1; tensor, row and row2 x f32, bf16 and f16; 8 blocks (7 of eights), of one row
  // or of 2 sizes, x those types and e8m0, but for zeros of each kind; three of e4m3 with those of
  // one row, each under numbers of all, of rows and of pairs of indices; absmax with tensor, row
  // and row2; columns in another order with those of one row, with zeros and without; groups of
  // one column with zeros that are rounded; bitsandbytes:
  // 4 blocks x nested; torchao: 4 blocks x 5 types x 3 scalers.
  std::size_t expected = 0;
  for (const FormRow& row : form_rows()) {
    const Legal& legal = row.legal;
    expected += (legal.kinds & 1 << static_cast<int>(Kind::none)) != 0 ? 1 : 0;
    const std::size_t blocks = legal.step == 8 ? 7 : 8;
    expected += legal.typed && !legal.rounded ? 9 + blocks * 3 * 4 : 0;
    for (const bool zeros : {legal.zero, legal.sum, legal.rounded})
      expected += zeros ? 9 + blocks * 3 * 3 : 0;
    expected += legal.rounded ? blocks * 3 : 0;
    expected += legal.named ? blocks * 3 * 2 : 0;
    expected += legal.absmax ? 3 : 0;
    expected +=
        (legal.product ? 3 * 8 * 3 : 0) + (legal.nested ? 4 * 2 : 0) + (legal.open ? 4 * 5 * 3 : 0);
  }
  EXPECT_EQ(storages.size(), expected);
  std::set<std::int64_t> keys;
  for (const Storage& storage : storages) {
    EXPECT_EQ(parse_storage(to_string(storage)), storage) << to_string(storage);
    EXPECT_EQ(storage_from_key(storage_key(storage)), storage) << to_string(storage);
    EXPECT_GE(storage_key(storage), 0);
    EXPECT_TRUE(keys.insert(storage_key(storage)).second) << to_string(storage);
  }
}

TEST(Storage, DefaultsAreFilledInAndWrittenOut) {
  const std::vector<std::pair<const char*, const char*>> rows{
      {"f32", "f32"},
      {"bf16", "bf16"},
      {"bf16:none", "bf16"},
      {"f8_e4m3", "f8_e4m3"},
      {"f8_e5m2:none", "f8_e5m2"},
      {"f8_e4m3:row2", "f8_e4m3:row2"},
      {"f8_e5m2:tensor", "f8_e5m2:tensor"},
      {"int8", "int8:row"},
      {"int8:block128", "int8:block128"},
      {"f8_e4m3:block32:e8m0", "f8_e4m3:block32:e8m0"},
      {"f8_e4m3:block128x128", "f8_e4m3:block128x128"},
      {"int8:block4x96:e8m0", "int8:block4x96:e8m0"},
      {"int8:bf16", "int8:row:bf16"},
      {"int8:absmax", "int8:row:absmax"},
      {"int8:zero", "int8:row:zero"},
      {"int8:block128:bf16:zero", "int8:block128:bf16:zero"},
      {"f8_e4m3:tensor:f16", "f8_e4m3:tensor:f16"},
      {"f8_e5m2:block128x128:bf16", "f8_e5m2:block128x128:bf16"},
      {"nf4", "nf4:block64"},
      {"nf4:nested", "nf4:block64:nested"},
      {"nf4:torchao", "nf4:torchao"},
      {"nf4:torchao:bf16", "nf4:torchao:bf16"},
      {"nf4:torchao:block64:scaler256:f64", "nf4:torchao:f64"},
      {"nf4:torchao:block32:scaler1", "nf4:torchao:block32:scaler1"},
      {"nf4:torchao:block16:scaler2", "nf4:torchao:block16:scaler2"},
      {"nf4:torchao:scaler128:f16", "nf4:torchao:scaler128:f16"},
      {"f4_e2m1", "f4_e2m1:block32"},
      {"f4_e2m1:row", "f4_e2m1:row"},
      {"f4_e2m1:block32:e8m0", "mxfp4"},
      {"f4_e2m1:block16:e8m0", "f4_e2m1:block16:e8m0"},
      {"mxfp4", "mxfp4"},
      {"mxfp4:transposed", "mxfp4:transposed"},
      {"f4_e2m1:transposed", "f4_e2m1:block32:transposed"},
      {"f4_e2m1:block16:bf16:transposed", "f4_e2m1:block16:bf16:transposed"},
      {"f4_e2m1:block16:e4m3", "nvfp4"},
      {"f4_e2m1:block32:e4m3", "f4_e2m1:block32:e4m3"},
      {"nvfp4", "nvfp4"},
      {"f4_e2m1:block16:e4m3_bf16", "f4_e2m1:block16:e4m3_bf16"},
      {"f4_e2m1:block16:e4m3_quotient", "f4_e2m1:block16:e4m3_quotient"},
      {"int4", "int4:block128"},
      {"int4:zero", "int4:block128:zero"},
      {"int4:block32:bf16:zero", "int4:block32:bf16:zero"},
      {"int4:actorder", "int4:block128:actorder"},
      {"int4:block32:f16:zero:actorder", "int4:block32:f16:zero:actorder"},
      {"int8:block7:actorder", "int8:block7:actorder"},
      {"int4:tensor:f16", "int4:tensor:f16"},
      {"int4:block64:bf16:zero_sum", "int4:block64:bf16:zero_sum"},
      {"uint4", "q4_k"},
      {"uint4:block64:f16:zero_rounded", "uint4:block64:f16:zero_rounded"},
      {"mxfp8_e4m3", "f8_e4m3:block32:e8m0"},
      {"mxfp8_e5m2", "f8_e5m2:block32:e8m0"},
      {"mxint8", "int8:block32:e8m0"},
      {"fp4", "fp4:block64"},
      {"fp4:block4096:nested", "fp4:block4096:nested"},
  };
  for (const auto& [text, canonical] : rows)
    EXPECT_EQ(to_string(parse_storage(text)), canonical) << text;
}

TEST(Storage, E4m3ScalesStandUnderNumbersOfRowsOrOfPairsOfIndices) {
  const std::vector<std::pair<const char*, const char*>> rows{
      {"nvfp4:row", "nvfp4:row"},
      {"f4_e2m1:block16:e4m3:row2", "nvfp4:row2"},
      {"f4_e2m1:e4m3:row", "f4_e2m1:block32:e4m3:row"},
      {"f4_e2m1:block16:e4m3_quotient:row2", "f4_e2m1:block16:e4m3_quotient:row2"}};
  for (const auto& [text, canonical] : rows)
    EXPECT_EQ(to_string(parse_storage(text)), canonical) << text;
  for (const char* text : {"nvfp4:tensor", "nvfp4:row:row", "nvfp4:row:row2", "nvfp4:block16",
                           "mxfp4:row", "f4_e2m1:row:row", "f4_e2m1:row:e4m3:row",
                           "f4_e2m1:block16:row", "f4_e2m1:block16:row:e4m3"})
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument, "[:row|:row2]");
}

TEST(Storage, IntegersOfOtherWidthsHaveBlocksOfWholeEights) {
  const std::vector<std::pair<const char*, const char*>> rows{
      {"int3", "int3:block128"},
      {"int7:block24:zero:actorder", "int7:block24:zero:actorder"},
      {"int5:row:f16:zero", "int5:row:f16:zero"},
      {"int6:block256:super", "q6_k"},
      {"int6:block256", "int6:block256"}};
  for (const auto& [text, canonical] : rows)
    EXPECT_EQ(to_string(parse_storage(text)), canonical) << text;
  for (const char* text : {"int3:block12", "int3:block256:super", "int6:super",
                           "int6:block128:super", "q6_k:zero", "q6_k:actorder", "int7:nested"})
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument, legal_storages());
}

TEST(Storage, HasGroupsOfColumnsOfUnsignedCodesWithRoundedZeros) {
  const Storage storage = parse_storage("uint4:column64:bf16:zero_rounded");
  EXPECT_EQ(to_string(storage), "uint4:column64:bf16:zero_rounded");
  EXPECT_EQ(storage.scaling.kind, Kind::column);
  const Descriptor form = describe(storage);
  EXPECT_EQ(form.scale.group.kind, Group::Kind::column);
  EXPECT_EQ(form.scale.group.n, 64);
  EXPECT_EQ(form.packing, Packing::low_first);
  for (const char* text :
       {"uint4:column64", "uint4:column64:zero", "uint4:column64:e8m0:zero_rounded",
        "uint4:column7:zero_rounded", "uint4:column0:zero_rounded", "uint4:column:zero_rounded",
        "uint4:column4x8:zero_rounded", "uint4:column64:zero_rounded:actorder",
        "uint4:column64:zero_rounded:transposed", "int4:column64:zero", "int8:column64"})
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument, "|:column<N>]");
}

TEST(Storage, LiesTransposedInBlocksOfPlainScales) {
  for (const char* text : {":transposed", "nf4:transposed", "nvfp4:transposed",
                           "f4_e2m1:row:transposed", "mxfp4:transposed:transposed"})
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument, "[:transposed]");
  const Storage storage = parse_storage("mxfp4:transposed");
  EXPECT_EQ(lying(storage), parse_storage("mxfp4"));
  EXPECT_EQ(lying(storage, {2, 64, 3}), (Shape{2, 3, 64}));
  EXPECT_EQ(layout(storage, {2, 64, 3}).parts[0].shape, (Shape{2, 96}));
  for (const Shape& shape : {Shape{64, 3}, Shape{2, 3, 64}, Shape{2, 2, 32, 2}})
    EXPECT_STOWAGE_ERROR(layout(storage, shape), invalid_argument, "a multiple of 32");
}

TEST(Storage, ReadsEveryField) {
  const Storage nested = parse_storage("fp4:block128:nested");
  EXPECT_EQ(nested.codes, Codes::fp4);
  EXPECT_EQ(nested.scaling.kind, Kind::block);
  EXPECT_EQ(nested.scaling.block, 128);
  EXPECT_TRUE(nested.scaling.nested);
  EXPECT_EQ(parse_storage("nf4:torchao").dialect, Dialect::torchao);
}

TEST(Storage, TheTorchaoDialectTakesTheTypeOfItsValues) {
  const Storage open = parse_storage("nf4:torchao:block128");
  EXPECT_EQ(open.scaling.type, ScaleType::of_values);
  EXPECT_EQ(to_string(storage_for_values(open, Dtype::bf16)), "nf4:torchao:block128:bf16");
  EXPECT_EQ(to_string(storage_for_values(open, Dtype::f64)), "nf4:torchao:block128:f64");
  EXPECT_EQ(storage_for_values(open, Dtype::i8), open);
  const Storage fixed = parse_storage("nf4:torchao:f16");
  EXPECT_EQ(storage_for_values(fixed, Dtype::f32), fixed);
  EXPECT_EQ(storage_for_values(parse_storage("nf4"), Dtype::bf16), parse_storage("nf4"));
}

TEST(Storage, RefusesEveryIllegalStringWithTheLegalOnes) {
  for (const char* text : {"",
                           ":",
                           "f8",
                           "f8_e4m4",
                           "F8_E4M3",
                           " nf4",
                           "nf4 ",
                           "f8_e4m3:",
                           "f8_e4m3:rows",
                           "f8_e4m3:nested",
                           "f8_e4m3:row:nested",
                           "f8_e4m3:row:tensor",
                           "f8_e4m3:block",
                           "f8_e4m3:block0",
                           "f8_e4m3:block1",
                           "f8_e4m3:block-64",
                           "f8_e4m3:block064",
                           "f8_e4m3:block64x",
                           "f8_e4m3:block1048577",
                           "f8_e4m3:block99999999999",
                           "f8_e4m3:torchao",
                           "int8:none",
                           "f4_e2m1:none",
                           "mxfp4:block32",
                           "mxfp8",
                           "f4_e2m1:nested",
                           "f4_e2m1:block33",
                           "f4_e2m1:block4x7",
                           "int8:nested",
                           "nf4:row",
                           "nf4:none",
                           "nf4:tensor",
                           "nf4:block16",
                           "nf4:block96",
                           "nf4:block8192",
                           "nf4:block64:nested:nested",
                           "nf4:nested:block64",
                           "nf4:torchao:",
                           "nf4:torchao:block8",
                           "nf4:torchao:scaler3",
                           "nf4:torchao:scaler0",
                           "nf4:torchao:scaler8192",
                           "nf4:torchao:scaler256:block64",
                           "nf4:torchao:bf16:block64",
                           "nf4:torchao:int8",
                           "nf4:torchao:bf16:f32",
                           "nf4:torchao:nested",
                           "nf4:block64:torchao",
                           "fp4:torchao",
                           "bf16:row",
                           "f32:block64",
                           "f16:nested"}) {
    SCOPED_TRACE(text);
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument, legal_storages());
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument,
                         "; got '" + std::string(text) + "'");
  }
}

TEST(Storage, RefusesBlocksAndPowersOfTwoThatNoFormatHas) {
  for (const char* text : {"f8_e4m3:bf16",
                           "nvfp4:zero",
                           "f4_e2m1:row:e4m3",
                           "f4_e2m1:tensor:e4m3_quotient",
                           "int4:block16:e4m3_bf16",
                           "f4_e2m1:block4x32:e4m3",
                           "f8_e4m3:block16:e4m3",
                           "int8:row:f64",
                           "int8:block32:absmax",
                           "int8:row:absmax:zero",
                           "f8_e4m3:row:absmax",
                           "int4:row:absmax",
                           "f8_e4m3:row:zero",
                           "int8:row:zero:bf16",
                           "int8:block32:e8m0:zero",
                           "int4:none",
                           "int4:nested",
                           "int4:block33",
                           "int4:block32:e8m0:zero",
                           "int4:block32:e8m0:zero_sum",
                           "int4:block32:zero_sum:actorder",
                           "int4:block32:zero:zero_sum",
                           "int4:block32:zero_rounded",
                           "int8:row:zero_sum",
                           "uint4:block64",
                           "uint4:block64:super",
                           "uint4:row:zero",
                           "uint4:zero_rounded",
                           "uint4:block7:zero_rounded",
                           "int4:row:actorder",
                           "int4:block4x32:actorder",
                           "int8:actorder",
                           "int8:block32:e8m0:actorder",
                           "f8_e4m3:block32:actorder",
                           "f4_e2m1:block32:actorder",
                           "nf4:actorder",
                           "int4:block32:actorder:zero",
                           "int8:bf16:row",
                           "int8:row:of_values",
                           "nf4:bf16",
                           "bf16:bf16",
                           "int8:row:bf16:f16",
                           "f8_e4m3:e8m0",
                           "f8_e4m3:row:e8m0",
                           "f8_e4m3:block32:f32",
                           "f8_e4m3:blockx32",
                           "f8_e4m3:block32x",
                           "f8_e4m3:block3x32",
                           "f8_e4m3:block1x32",
                           "f8_e4m3:block8192x32",
                           "f8_e4m3:block4x1",
                           "f8_e4m3:block4x4x4",
                           "nf4:block64:e8m0",
                           "nf4:block4x64",
                           "nf4:torchao:e8m0"})
    EXPECT_STOWAGE_ERROR(parse_storage(text), invalid_argument,
                         "; got '" + std::string(text) + "'");
}

TEST(Storage, TheLegalTextNamesEveryFormat) {
  for (const FormatTrait& format : formats())
    EXPECT_THAT(legal_storages(), testing::HasSubstr(std::string(format.name)));
  EXPECT_THAT(legal_storages(), testing::HasSubstr("nf4:torchao"));
}

TEST(Storage, RefusesKeysThatStandForNothing) {
  const std::int64_t row = storage_key(parse_storage("int8:row"));
  for (const std::int64_t key :
       {std::int64_t{-1}, std::int64_t{8}, std::int64_t{255}, row | 1 << 22, row | 1 << 21,
        row | 2 << 10, row | std::int64_t{4} << 60, row | std::int64_t{2} << 60, row | 3 << 16,
        row | 1 << 24})
    EXPECT_STOWAGE_ERROR(storage_from_key(key), invalid_argument, "storage key: must come from");
  // Every type of scales that a key has room for and that no storage has.
  const std::int64_t block = storage_key(parse_storage("f4_e2m1:block16"));
  for (std::int64_t type = 1 + static_cast<int>(ScaleType::e4m3_quotient); type < 16; ++type)
    EXPECT_STOWAGE_ERROR(storage_from_key(block | type << 16), invalid_argument,
                         "storage key: must come from");
}

TEST(Storage, HandMadeOnesAreChecked) {
  EXPECT_STOWAGE_ERROR(
      check_legal({Codes::f4_e2m1,
                   Dialect::standard,
                   {.kind = Kind::block, .block = 16, .type = static_cast<ScaleType>(15)}},
                  "layout"),
      invalid_argument, "got 'f4_e2m1:block16:?'");
  EXPECT_STOWAGE_ERROR(check_legal({Codes::nf4, Dialect::standard, {.kind = Kind::row}}, "layout"),
                       invalid_argument, "layout: storage: must be one of f32");
  EXPECT_STOWAGE_ERROR(check_legal({static_cast<Codes>(99)}, "layout"), invalid_argument,
                       "got '99'");
}

}  // namespace
}  // namespace stowage
