// SPDX-License-Identifier: Apache-2.0
// Files of hqq whose modules contradict themselves, or say what is not read.
#include <algorithm>

#include "store/refusal_models.h"

namespace stowage::test {
namespace {

Piece number(const std::string& name, std::uint32_t value) {
  return {"a." + name, "I32", "[]", 4, words_of({value})};
}
Piece text(const std::string& name, const std::string& value) {
  return {"a." + name, "U8", "[" + std::to_string(value.size()) + "]", value.size(), value};
}
Piece flag(const std::string& name, char value) {
  return {"a." + name, "U8", "[]", 1, std::string(1, value)};
}

// [4, 16] in groups of 8; with these tensors in the places of those of their names, or beside them;
// one without a dtype is left out.
Make module(const std::vector<Piece>& changes) {
  std::vector<Piece> all{{"a.W_q", "U8", "[4,8]", 32},
                         {"a.scale", "F16", "[8,1]", 16},
                         {"a.zero", "F16", "[8,1]", 16},
                         {"a.shape", "I64", "[2]", 16, words_of({4, 0, 16, 0})},
                         number("nbits", 4),
                         number("axis", 1),
                         number("group_size", 8)};
  for (const Piece& change : changes) {
    std::erase_if(all, [&](const Piece& piece) { return piece.name == change.name; });
    if (!change.dtype.empty()) all.push_back(change);
  }
  return configured(R"({"quant_method": "hqq", "skip_modules": ["lm_head"]})", all);
}
Piece without(const std::string& name) { return {"a." + name, "", "", 0}; }

const Rows kHqq{{
    {Refusal::dialect_part,
     "hqq of eight bits",
     module({number("nbits", 8)}),
     {"tensor 'a.nbits'", "nbits '8' for 4"}},
    {Refusal::dialect_part,
     "hqq of no width",
     module({without("nbits")}),
     {"tensor 'a.W_q'", "no 'a.nbits'"}},
    {Refusal::dialect_part,
     "hqq along no axis of a matrix",
     module({number("axis", 2)}),
     {"tensor 'a.axis'", "axis 2 for 0 or 1"}},
    {Refusal::dialect_part,
     "groups of hqq that columns do not hold",
     module({number("axis", 0)}),
     {"tensor 'a.group_size'", "groups of 8 in columns of 4, which they do not fill"}},
    {Refusal::dialect_part,
     "codes of hqq in groups along the other axis",
     module({number("axis", 0), number("group_size", 4)}),
     {"tensor 'a.W_q'", "U8 [4, 8] for U8 [2, 16]"}},
    {Refusal::dialect_part,
     "scales of hqq along the other axis",
     module({number("axis", 0),
             number("group_size", 4),
             {"a.W_q", "U8", "[2,16]", 32},
             {"a.scale", "F16", "[16,1]", 32}}),
     {"tensor 'a.scale'", "F16 [16, 1] for F16 [1, 16]"}},
    {Refusal::dialect_part,
     "codes of hqq under the type of other numbers",
     module({flag("view_as_float", 1)}),
     {"tensor 'a.view_as_float'", "view_as_float '1' for 0"}},
    {Refusal::dialect_part,
     "one scale of hqq for a matrix",
     module({flag("channel_wise", 0)}),
     {"tensor 'a.channel_wise'", "channel_wise '0' for 1"}},
    {Refusal::dialect_part,
     "scales of hqq that are codes",
     module({flag("quant_scale", 1)}),
     {"tensor 'a.quant_scale'", "quant_scale '1' for 0"}},
    {Refusal::dialect_part,
     "zeros of hqq that are codes",
     module({flag("quant_zero", 1)}),
     {"tensor 'a.quant_zero'", "quant_zero '1' for 0"}},
    {Refusal::dialect_part,
     "another packing of hqq",
     module({text("packing", "4bit_32")}),
     {"tensor 'a.packing'", "packing '4bit_32' for 4bit_u8"}},
    {Refusal::dialect_part,
     "hqq that unpacks to another type",
     module({text("unpack_view_dtype", "torch.int32")}),
     {"tensor 'a.unpack_view_dtype'", "'torch.int32' for torch.uint8"}},
    {Refusal::dialect_part,
     "hqq that computes in another type than its scales have",
     module({text("compute_dtype", "torch.bfloat16")}),
     {"tensor 'a.compute_dtype'", "compute_dtype 'torch.bfloat16' for scales of F16"}},
    {Refusal::dialect_part,
     "a setting of hqq that is a list",
     module({{"a.axis", "I32", "[2]", 8}}),
     {"tensor 'a.axis'", "I32 [2] for a setting of I32 in 0 dimensions"}},
    {Refusal::dialect_part,
     "a shape of hqq of three dimensions",
     module({{"a.shape", "I64", "[3]", 24, words_of({4, 0, 4, 0, 4, 0})}}),
     {"tensor 'a.shape'", "a shape of no matrix"}},
    {Refusal::dialect_part,
     "a shape of hqq that no memory holds",
     module({{"a.shape", "I64", "[2]", 16, words_of({0, 0x40000000, 0, 0x40000000})}}),
     {"tensor 'a.shape'", "a shape of no matrix"}},
    {Refusal::dialect_part,
     "groups of hqq that run on across rows",
     module({number("group_size", 32)}),
     {"tensor 'a.group_size'", "groups of 32 in rows of 16, which they do not fill"}},
    {Refusal::dialect_part,
     "no groups of hqq",
     module({number("group_size", 0)}),
     {"tensor 'a.group_size'", "groups of 0 in rows of 16"}},
    {Refusal::dialect_part,
     "groups of hqq that begin inside of a byte",
     module({number("group_size", 1)}),
     {"tensor 'a.group_size'", "groups of 1 for an even number"}},
    {Refusal::dialect_part,
     "codes of hqq for another shape",
     module({{"a.shape", "I64", "[2]", 16, words_of({8, 0, 16, 0})}}),
     {"tensor 'a.W_q'", "U8 [4, 8] for U8 [8, 8]"}},
    {Refusal::dialect_part,
     "groups of hqq that are not two halves",
     module({{"a.shape", "I64", "[2]", 16, words_of({1, 0, 8, 0})}}),
     {"tensor 'a.W_q'", "1 groups of 8, which are not two halves"}},
    {Refusal::dialect_part,
     "codes of hqq without scales",
     module({without("scale")}),
     {"tensor 'a.W_q'", "no 'a.scale'"}},
    {Refusal::dialect_part,
     "codes of hqq without zeros",
     module({without("zero")}),
     {"tensor 'a.W_q'", "no 'a.zero' (F16 [8, 1])"}},
    {Refusal::dialect_part,
     "zeros of hqq of another type than the scales",
     module({{"a.zero", "BF16", "[8,1]", 16}}),
     {"tensor 'a.zero'", "BF16 [8, 1] for F16 [8, 1]"}},
    {Refusal::dialect_part,
     "scales of hqq that are no numbers",
     module({{"a.scale", "U8", "[8,1]", 8}}),
     {"tensor 'a.scale'", "U8 [8, 1] for scales of F16, BF16 or F32"}},
    {Refusal::dialect_part,
     "codes of hqq in a module that its configuration skips",
     configured(R"({"quant_method": "hqq", "skip_modules": ["a"]})",
                {{"a.W_q", "U8", "[4,8]", 32},
                 {"a.scale", "F16", "[8,1]", 16},
                 {"a.zero", "F16", "[8,1]", 16},
                 {"a.shape", "I64", "[2]", 16, words_of({4, 0, 16, 0})},
                 number("nbits", 4),
                 number("axis", 1),
                 number("group_size", 8)}),
     {"tensor 'a.W_q'", "skip_modules of"}},
}};

}  // namespace
}  // namespace stowage::test
