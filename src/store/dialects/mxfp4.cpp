// SPDX-License-Identifier: Apache-2.0
// MXFP4 as gpt-oss is published and transformers writes it (Mxfp4Config), by the configuration
// beside the files: experts, whose parameter W [E, K, O] is multiplied from the right,
//   W_blocks   U8 [E, O, K / 32, 16], E2M1, the first of two values of a column in the low bits
//   W_scales   U8 [E, O, K / 32], exponents
// with no `.weight` in the name. So they lie transposed, and rest so. All else is plain.
#include <algorithm>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace mxfp4 {
namespace {

constexpr std::string_view kBlocks = "_blocks", kScales = "_scales";
constexpr std::int64_t kBlock = 32, kBytes = 16;
// The parameters that its readers have codes for.
constexpr std::string_view kNames[] = {".gate_up_proj", ".down_proj"};

Storage storage() { return parse_storage("mxfp4:transposed"); }

bool ends_with(std::string_view name, std::string_view suffix) {
  return name.size() > suffix.size() && name.ends_with(suffix);
}

void add(Claims& claims, const TensorInfo& blocks) {
  const Shape& shape = blocks.shape;
  const std::string name = blocks.name.substr(0, blocks.name.size() - kBlocks.size());
  if (blocks.dtype != Dtype::u8 || shape.rank() != 4 || shape[3] != kBytes)
    refuse(Refusal::dialect_part, claims.place(blocks),
           described(blocks) + " for U8 blocks of 16 bytes, in four dimensions");
  const std::string scales = name + std::string(kScales);
  claims.part(Refusal::dialect_part, blocks,
              {scales, Dtype::u8, Shape{shape[0], shape[1], shape[2]}, {}});
  const Shape weight{shape[0], size_of(claims, blocks, 2, kBlock), shape[1]};
  try {
    (void)layout(storage(), weight);
  } catch (const Error& error) {
    refuse(Refusal::dialect_part, claims.place(blocks), in_quotes(error.what()));
  }
  const WeightInfo& made =
      claims.add(name, storage(), weight, {blocks.name, scales}, claims.source().config->compute());
  check_not_listed(claims, made, "modules_to_not_convert");
}

void read(Claims& claims) {
  for (const TensorInfo& tensor : claims.tensors())
    if (ends_with(tensor.name, kBlocks)) add(claims, tensor);
  for (const TensorInfo& tensor : claims.tensors()) {
    if (!ends_with(tensor.name, kScales) || claims.is_taken(tensor.name)) continue;
    if (tensor.dtype != Dtype::u8) continue;
    const std::string blocks =
        tensor.name.substr(0, tensor.name.size() - kScales.size()) + std::string(kBlocks);
    refuse(Refusal::dialect_part, claims.place(tensor), formatted("no {} (U8)", in_quotes(blocks)));
  }
}

bool write(Wording& wording, const WeightInfo& weight) {
  const bool known = std::ranges::any_of(
      kNames, [&](std::string_view name) { return ends_with(weight.name, name); });
  if (!known || weight.storage != storage()) return false;
  const Shape& shape = weight.shape;
  const Shape scales{shape[0], shape[2], shape[1] / kBlock};
  wording.add_part(weight.name + std::string(kBlocks), Dtype::u8,
                   Shape{scales[0], scales[1], scales[2], kBytes}, 0);
  wording.add_part(weight.name + std::string(kScales), Dtype::u8, scales, 1);
  return true;
}

void finish(Wording& wording) {
  wording.set_config(
      {{"quant_method", "mxfp4"}, {"modules_to_not_convert", wording.plain_modules()}});
}

std::string recognise(const TensorSource&) { return ""; }  // its configuration alone says it

}  // namespace
}  // namespace mxfp4

const FileDialect kMxfp4{"mxfp4",     "mxfp4",      mxfp4::recognise,
                         mxfp4::read, mxfp4::write, mxfp4::finish};

}  // namespace stowage::dialects
