// SPDX-License-Identifier: Apache-2.0
// GGUF: each tensor [O, K] has a type of its own. Those of blocks have the codes and the scales of
// 32 neighbours of a row in one record, NVFP4 of 64:
//   Q8_0    34 bytes   F16 scale, 32 I8 codes
//   Q4_K    144 bytes, of 256 neighbours: the record of their scales (16), 128 of codes of which
//           each 32 have 64 by halves
//   Q6_K    210 bytes, of 256 neighbours: 128 of the lower four bits of codes, which each 64 have
//           of 128 by halves; 64 of the upper two, 32 of 128 by quarters; the record of scales (18)
//   Q4_0    18 bytes   F16 scale, 32 codes + 8 by halves
//   MXFP4   17 bytes   E8M0 scale, 32 codes of E2M1 by halves
//   NVFP4   36 bytes   four scales of E4M3, each of 16 codes of E2M1 by halves; no scale is
//   negative
//                      or NaN. MODULE.scale F32 [1], where it is, multiplies all
//   F32, F16, BF16 and integers are plain tensors
//
// by halves of n codes:   byte j   [ 7..4: code j + n/2 | 3..0: code j ]
#include <algorithm>
#include <array>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace gguf {
namespace {

constexpr const char* kSplit = "split.count";
constexpr std::string_view kNvfp4 = "NVFP4";

struct BlockType {
  std::string_view name, storage;
  PartForm codes, scales;
};
constexpr std::array kBlockTypes{
    BlockType{"Q8_0",
              "int8:block32:f16",
              {.in_file = 8, .in_part = 8, .word = 8, .record = 34, .at = 2, .span = 32},
              {.in_file = 16, .in_part = 16, .word = 16, .record = 34, .span = 2}},
    BlockType{
        "Q4_0",
        "int4:block32:f16",
        {.in_file = 4, .in_part = 4, .word = 8, .record = 18, .at = 2, .span = 16, .halves = 32},
        {.in_file = 16, .in_part = 16, .word = 16, .record = 18, .span = 2}},
    BlockType{
        "Q4_K",
        "q4_k",
        {.in_file = 4, .in_part = 4, .word = 8, .record = 144, .at = 16, .span = 128, .halves = 64},
        {.in_file = 8, .in_part = 8, .word = 8, .record = 144, .span = 16}},
    BlockType{"Q6_K",
              "q6_k",
              {.in_file = 6, .in_part = 6, .word = 8, .record = 210, .span = 192, .halves = 128},
              {.in_file = 8, .in_part = 8, .word = 8, .record = 210, .at = 192, .span = 18}},
    BlockType{
        "MXFP4",
        "mxfp4",
        {.in_file = 4, .in_part = 4, .word = 8, .record = 17, .at = 1, .span = 16, .halves = 32},
        {.in_file = 8, .in_part = 8, .word = 8, .record = 17, .span = 1}},
    BlockType{
        kNvfp4,
        "nvfp4",
        {.in_file = 4, .in_part = 4, .word = 8, .record = 36, .at = 4, .span = 32, .halves = 16},
        {.in_file = 8, .in_part = 8, .word = 8, .record = 36, .span = 4, .most = 0x7e}}};

void refuse_split(const TensorSource& source) {
  for (std::size_t i = 0; i < source.metadata.size(); ++i) {
    const auto said = source.metadata[i]->find(kSplit);
    if (said == source.metadata[i]->end() || said->second == "0" || said->second == "1") continue;
    refuse(Refusal::dialect_config, {source.paths[i], "", {}},
           formatted("{} {}: one file of a model that is split", kSplit, in_quotes(said->second)));
  }
}

// The number over all scales: a tensor beside the weight, or 1.
void add_outer(Claims& claims, WeightInfo& weight) {
  const std::string name = std::string(module_of(weight.name)) + ".scale";
  const TensorInfo* const outer = claims.find(name);
  if (outer != nullptr &&
      (outer->dtype != Dtype::f32 || outer->shape.elements() != 1 || claims.is_taken(name)))
    refuse(Refusal::dialect_part, claims.place(*outer), described(*outer) + " for one F32");
  weight.parts.push_back(outer == nullptr ? weight.name : name);
  weight.forms.push_back({.one = outer == nullptr});
  if (outer != nullptr) claims.take(name);
  add_activation_scale(claims, weight, "input_scale");
}

void add_blocks(Claims& claims, const TensorInfo& tensor) {
  const auto type = std::ranges::find(kBlockTypes, tensor.dtype_name, &BlockType::name);
  if (type == kBlockTypes.end())
    refuse(Refusal::dialect_part, claims.place(tensor),
           formatted("{} for Q8_0, Q4_0, Q4_K, Q6_K, MXFP4, NVFP4 or a type without blocks",
                     described(tensor)));
  if (tensor.shape.rank() < 2)
    refuse(Refusal::dialect_part, claims.place(tensor),
           described(tensor) + " for two dimensions or more");
  const Storage storage = parse_storage(type->storage);
  try {
    (void)layout(storage, tensor.shape);
  } catch (const Error& error) {
    refuse(Refusal::dialect_part, claims.place(tensor), in_quotes(error.what()));
  }
  WeightInfo& made = claims.add(tensor.name, storage, tensor.shape, {tensor.name, tensor.name}, {});
  made.forms = {type->codes, type->scales};
  if (type->name == kNvfp4) add_outer(claims, made);
}

void read(Claims& claims) {
  refuse_split(claims.source());
  for (const TensorInfo& tensor : claims.tensors())
    if (tensor.dtype == Dtype::unknown) add_blocks(claims, tensor);
}

std::string recognise(const TensorSource& source) { return source.is_gguf ? "magic 'GGUF'" : ""; }

}  // namespace
}  // namespace gguf

const FileDialect kGguf{
    .name = "gguf", .method = "", .recognise = gguf::recognise, .read = gguf::read};

}  // namespace stowage::dialects
