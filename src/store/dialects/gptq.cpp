// SPDX-License-Identifier: Apache-2.0
// GPTQ of four bits, by the configuration beside the files:
//   MODULE.qweight  I32 [K / 8, O], eight columns of a row, the first in the lowest bits
//   MODULE.qzeros   I32 [K / group_size, O / 8], eight rows of a group; unless checkpoint_format is
//                   gptq_v2, 0x11111111 was taken from each word, borrows and all
//   MODULE.scales   F16 or BF16 [K / group_size, O]
//   MODULE.g_idx    I32 [K]: the group of each column
#include <algorithm>
#include <array>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/groups.h"
#include "store/dialects/int4_words.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace gptq {
namespace {

constexpr PartForm kCodes{.in_file = 4, .in_part = 4, .word = 32, .transposed = true};
constexpr PartForm kZeros{.in_file = 4,
                          .in_part = 8,
                          .word = 32,
                          .axis = PartForm::Axis::rows,
                          .transposed = true,
                          .bias = 8};

constexpr std::array<std::string_view, 2> kFormats{"gptq", "gptq_v2"};

PartForm zeros_of(std::string_view format) {
  PartForm zeros = kZeros;
  if (format == kFormats[0]) zeros.less = 1;
  return zeros;
}

PartForm zeros_of(const QuantConfig& config) {
  const std::string said = config.text("checkpoint_format").value_or("gptq");
  if (std::ranges::count(kFormats, said) == 0)
    config.refuse("checkpoint_format " + in_quotes(said));
  return zeros_of(said);
}

void check(const QuantConfig& config) {
  const auto is = [&](const char* key, const nlohmann::json& wanted) {
    const auto said = config.all().find(key);
    if (said != config.all().end() && !said->is_null() && *said != wanted)
      config.refuse(formatted("{} {}", key, in_quotes(said->dump())));
  };
  if (!config.all().contains("bits")) config.refuse("no bits");
  is("bits", 4);
  is("pack_dtype", "int32");
  is("dynamic", nlohmann::json::object());
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  check(config);
  const Int4Words form{.codes = kCodes,
                       .zeros = zeros_of(config),
                       .packed = 0,
                       .group = int4_group(config, "group_size")};
  for (const TensorInfo& words : claims.tensors()) {
    if (!words.name.ends_with(kInt4Codes)) continue;
    WeightInfo& made = form.add(claims, words);
    add_groups(claims, made, std::string(module_of(made.name)) + ".g_idx");
  }
}

std::string_view format_of(const Wording& wording) {
  return wording.form().empty() ? kFormats[0] : wording.form();
}

bool write(Wording& wording, const WeightInfo& weight) {
  const PartForm zeros = zeros_of(format_of(wording));
  if (!Int4Words{.codes = kCodes, .zeros = zeros, .packed = 0}.write(wording, weight)) return false;
  const std::int64_t columns = weight.shape[1], group = int4_group_said(weight.storage);
  const std::string name = std::string(module_of(weight.name)) + ".g_idx";
  if (weight.storage.scaling.actorder) {
    wording.add_part(name, Dtype::i32, Shape{columns}, 3);
    return true;
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(columns));
  for (std::int64_t k = 0; k < columns && group > 0; ++k)
    order[static_cast<std::size_t>(k)] = static_cast<std::int32_t>(k / group);
  wording.add_text(name, Dtype::i32, Shape{columns}, bytes_of_numbers(order));
  return true;
}

bool rests(const Wording& wording, std::string_view module) {
  return std::ranges::any_of(wording.weights(),
                             [&](const auto& one) { return module_of(one.name) == module; });
}

// Its readers take each linear module that has a qweight, and no other.
void finish(Wording& wording) {
  check_one_group(wording);
  wording.set_config({{"bits", 4},
                      {"group_size", int4_group_said(wording.weights().front().storage)},
                      {"desc_act", has_groups(wording)},
                      {"sym", false},
                      {"lm_head", rests(wording, "lm_head")},
                      {"quant_method", "gptq"},
                      {"checkpoint_format", format_of(wording)},
                      {"pack_dtype", "int32"}});
}

std::string recognise(const TensorSource&) { return ""; }  // AWQ has the same names

}  // namespace
}  // namespace gptq

const FileDialect kGptq{"gptq",      "gptq",       gptq::recognise, gptq::read,
                        gptq::write, gptq::finish, gptq::kFormats};

}  // namespace stowage::dialects
