// SPDX-License-Identifier: Apache-2.0
#include "stowage/descriptor.h"

#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "expect_error.h"
#include "format/legal.h"
#include "format/reference.h"

namespace stowage {
namespace {

static_assert(std::is_trivially_copyable_v<Descriptor>);

struct Facts {
  const char* storage;
  Packing packing;
  Codec codec;
  FileForm file;
  Group::Kind group;
  std::int32_t n, outer;
  ScaleCode code;
  Dtype rounds_to;
};

TEST(Descriptor, SaysWhatEachStorageIs) {
  using enum Packing;
  using K = Group::Kind;
  using S = ScaleCode;
  constexpr Dtype kNone = Dtype::unknown;
  const std::vector<Facts> rows{
      {"bf16", whole, Codec::cast, FileForm::values, K::none, 0, 0, S::plain, kNone},
      {"f8_e4m3", whole, Codec::cast, FileForm::values, K::none, 0, 0, S::plain, kNone},
      {"f8_e5m2:tensor", whole, Codec::amax, FileForm::scaled, K::tensor, 0, 0, S::plain, kNone},
      {"int8", whole, Codec::amax, FileForm::scaled, K::row, 0, 0, S::plain, kNone},
      {"int8:row:absmax", whole, Codec::amax, FileForm::manifest, K::row, 0, 0, S::absmax, kNone},
      {"int8:row2", whole, Codec::amax, FileForm::scaled, K::row2, 0, 0, S::plain, kNone},
      {"int8:block48", whole, Codec::amax, FileForm::scaled, K::along, 48, 0, S::plain, kNone},
      {"f8_e4m3:block128x64", whole, Codec::amax, FileForm::scaled, K::block2, 64, 0, S::plain,
       kNone},
      {"fp4", high_first, Codec::bitsandbytes, FileForm::quant_state, K::flat, 64, 0, S::plain,
       kNone},
      {"f4_e2m1", low_first, Codec::amax, FileForm::manifest, K::along, 32, 0, S::plain, kNone},
      {"int4", low_first, Codec::amax, FileForm::manifest, K::along, 128, 0, S::plain, kNone},
      {"int4:row:zero", low_first, Codec::amax, FileForm::manifest, K::row, 0, 0, S::plain, kNone},
      {"int4:block32:actorder", low_first, Codec::amax, FileForm::manifest, K::named, 32, 0,
       S::plain, kNone},
      {"int8:block7:zero:actorder", whole, Codec::amax, FileForm::scaled, K::named, 7, 0, S::plain,
       kNone},
      {"int4:block64:bf16:zero_sum", low_first, Codec::amax, FileForm::manifest, K::along, 64, 0,
       S::plain, kNone},
      {"uint4:block64:f16:zero_rounded", low_first, Codec::amax, FileForm::manifest, K::along, 64,
       0, S::plain, kNone},
      {"int3:block8", dense, Codec::amax, FileForm::manifest, K::along, 8, 0, S::plain, kNone},
      {"q4_k", low_first, Codec::ggml, FileForm::manifest, K::along, 256, 0, S::q4_k, kNone},
      {"q6_k", dense, Codec::ggml, FileForm::manifest, K::along, 256, 0, S::q6_k, kNone},
      {"nvfp4", low_first, Codec::amax, FileForm::manifest, K::along, 16, 0, S::product, kNone},
      {"f4_e2m1:block16:e4m3_bf16", low_first, Codec::amax, FileForm::manifest, K::along, 16, 0,
       S::product_bf16, kNone},
      {"f4_e2m1:block16:e4m3_quotient", low_first, Codec::amax, FileForm::manifest, K::along, 16, 0,
       S::quotient, kNone},
      {"nf4:block128:nested", high_first, Codec::bitsandbytes, FileForm::quant_state, K::flat, 128,
       256, S::mapped, kNone},
      {"nf4:torchao:block32:scaler8:f16", high_first, Codec::torchao, FileForm::manifest, K::flat,
       32, 8, S::affine, Dtype::f16},
      {"nf4:torchao", high_first, Codec::torchao, FileForm::manifest, K::flat, 64, 256, S::affine,
       kNone},
  };
  for (const Facts& row : rows) {
    SCOPED_TRACE(row.storage);
    const Storage storage = parse_storage(row.storage);
    const Descriptor form = describe(storage);
    EXPECT_EQ(form.codes, storage.codes);
    EXPECT_EQ(form.packing, row.packing);
    EXPECT_EQ(form.codec, row.codec);
    EXPECT_EQ(form.file, row.file);
    EXPECT_EQ(form.scale.group.kind, row.group);
    EXPECT_EQ(form.scale.group.n, row.n);
    EXPECT_EQ(form.outer.group.n, row.outer);
    EXPECT_EQ(form.scale.code, row.code);
    EXPECT_EQ(form.rounds_to, row.rounds_to);
    EXPECT_EQ(form.parts.front().name, "codes");
    EXPECT_LE(form.parts.size(), static_cast<std::size_t>(kMaxParts));
  }
}

TEST(Descriptor, SaysWhatScalesStandUnder) {
  using K = Group::Kind;
  for (const auto& [name, kind] : {std::pair{"nvfp4", K::tensor}, std::pair{"nvfp4:row", K::row},
                                   std::pair{"f4_e2m1:block16:e4m3_bf16:row", K::row},
                                   std::pair{"f4_e2m1:block16:e4m3_quotient:row2", K::row2},
                                   std::pair{"nf4:nested", K::flat}, std::pair{"mxfp4", K::none}})
    EXPECT_EQ(describe(parse_storage(name)).outer.group.kind, kind) << name;
}

TEST(Descriptor, QuestionsTellTheKindsOfCodesApart) {
  for (const FormatTrait& format : formats()) {
    const Storage storage{.codes = format.codes, .scaling = format.default_scaling};
    const Packing packing = describe(storage).packing;
    const int kinds = static_cast<int>(is_value_cast(format.codes)) +
                      static_cast<int>(has_byte_codes(storage)) +
                      static_cast<int>(packing != Packing::whole);
    EXPECT_EQ(kinds, 1) << format.name;
    EXPECT_EQ(is_value_cast(format.codes), format.values.empty()) << format.name;
    const int together = format.bits >= 8 ? 1 : format.bits == 4 ? 2 : 8;
    EXPECT_EQ(codes_together(packing), together) << format.name;
    if (together != 1) {
      EXPECT_EQ(elements_of(storage, format.bits * 5), 40) << format.name;
    }
    EXPECT_EQ(runs_across_rows(storage), describe(storage).scale.group.kind == Group::Kind::flat)
        << format.name;
  }
}

// Without zeros int8 leaves -128 out; int4 does not, and a half more than its largest is its amax.
TEST(Descriptor, SaysWhatCodesReach) {
  const std::vector<std::tuple<const char*, float, float, float>> rows{
      {"f8_e4m3:row", -448, 448, 448},  {"f4_e2m1", -6, 6, 6},
      {"int8", -127, 127, 127},         {"int8:row:zero", -128, 127, 255},
      {"int4:row", -8, 7, 7.5f},        {"int4:block32:f16:zero", -8, 7, 15},
      {"int4:row:zero_sum", -8, 7, 15}, {"uint4:row:zero_rounded", 0, 15, 15},
      {"int3:row", -4, 3, 3.5f},        {"int7:block32:zero", -64, 63, 127},
      {"q6_k", -32, 31, 31.5f},         {"int2:tensor", -2, 1, 1.5f}};
  for (const auto& [storage, least, most, divisor] : rows) {
    const CodeRange range = code_range(parse_storage(storage));
    EXPECT_EQ(range.least, least) << storage;
    EXPECT_EQ(range.most, most) << storage;
    EXPECT_EQ(range.divisor, divisor) << storage;
  }
}

TEST(Descriptor, FormsThatNoRowNamesAreRefused) {
  EXPECT_EQ(form_row(Codes{kCodesCount}, Dialect::standard), nullptr);
  EXPECT_EQ(form_row(Codes::fp4, Dialect::torchao), nullptr);
  EXPECT_FALSE(is_legal({Codes{kCodesCount}}));
  EXPECT_STOWAGE_ERROR(describe({Codes{kCodesCount}}), invalid_argument, "describe: storage: must");
  EXPECT_FALSE(is_legal({.codes = Codes::fp4,
                         .dialect = Dialect::torchao,
                         .scaling = parse_storage("nf4:torchao").scaling}));
}

// Of storages that were made by hand: what asks the descriptor throws as it does.
TEST(Descriptor, QuestionsRefuseWhatNoRowNames) {
  const Storage made{Codes::fp4, Dialect::torchao, parse_storage("nf4:torchao:f32").scaling};
  EXPECT_STOWAGE_ERROR(group_elements(made, {64, 256}), invalid_argument, "storage: must");
  EXPECT_STOWAGE_ERROR(can_keep_nonfinite(made), invalid_argument, "storage: must");
  EXPECT_STOWAGE_ERROR(runs_across_rows(made), invalid_argument, "storage: must");
  EXPECT_STOWAGE_ERROR(has_byte_codes(made), invalid_argument, "storage: must");
  EXPECT_STOWAGE_ERROR(reference::scale_index(made, {64, 256}, 0), invalid_argument,
                       "storage: must");
}

TEST(Descriptor, TheDefaultOfEachFormatIsLegal) {
  for (const FormatTrait& format : formats())
    EXPECT_TRUE(is_legal({.codes = format.codes, .scaling = format.default_scaling}))
        << format.name;
}

}  // namespace
}  // namespace stowage
