// SPDX-License-Identifier: Apache-2.0
// AWQ of four bits in its version gemm, by the configuration beside the files:
//   MODULE.qweight  I32 [K, O / 8], a column of eight rows, which are rows 0, 2, 4, 6, 1, 3, 5, 7
//   MODULE.qzeros   I32 [K / group_size, O / 8], in the same order
//   MODULE.scales   F16 or BF16 [K / group_size, O]
#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/int4_words.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace awq {
namespace {

constexpr PartForm kCodes{.in_file = 4,
                          .in_part = 4,
                          .word = 32,
                          .axis = PartForm::Axis::rows,
                          .order = {0, 2, 4, 6, 1, 3, 5, 7},
                          .transposed = true};
constexpr PartForm kZeros{.in_file = 4,
                          .in_part = 8,
                          .word = 32,
                          .axis = PartForm::Axis::rows,
                          .order = kCodes.order,
                          .transposed = true,
                          .bias = 8};

void check(const QuantConfig& config) {
  const std::string version = config.text("version").value_or("");
  if (version != "gemm" && version != "GEMM") config.refuse("version " + in_quotes(version));
  const auto bits = config.all().find("bits"), zeros = config.all().find("zero_point");
  if (bits == config.all().end() || *bits != 4) config.refuse("weights of other than 4 bits");
  if (zeros == config.all().end() || *zeros != true) config.refuse("weights without zero_point");
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  check(config);
  const Int4Words form{
      .codes = kCodes, .zeros = kZeros, .packed = 1, .group = int4_group(config, "group_size")};
  for (const TensorInfo& words : claims.tensors())
    if (words.name.ends_with(kInt4Codes))
      check_not_listed(claims, form.add(claims, words), "modules_to_not_convert");
}

bool write(Wording& wording, const WeightInfo& weight) {
  if (weight.storage.scaling.actorder) return false;
  return Int4Words{.codes = kCodes, .zeros = kZeros, .packed = 1}.write(wording, weight);
}

void finish(Wording& wording) {
  check_one_group(wording);
  wording.set_config({{"quant_method", "awq"},
                      {"bits", 4},
                      {"group_size", int4_group_said(wording.weights().front().storage)},
                      {"zero_point", true},
                      {"version", "gemm"},
                      {"modules_to_not_convert", wording.plain_modules()}});
}

std::string recognise(const TensorSource&) { return ""; }  // GPTQ has the same names

}  // namespace
}  // namespace awq

const FileDialect kAwq{"awq", "awq", awq::recognise, awq::read, awq::write, awq::finish};

}  // namespace stowage::dialects
