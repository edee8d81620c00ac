// SPDX-License-Identifier: Apache-2.0
#include "store/dialects/int4_words.h"

#include <utility>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/dialects/scaled_codes.h"
#include "store/part_form.h"

namespace stowage::dialects {
namespace {

constexpr std::int64_t kInAWord = 8;
constexpr PartForm kScales{.in_file = 16, .in_part = 16, .word = 16, .transposed = true};

ScaleType scale_type(const Claims& claims, const TensorInfo& scales) {
  if (scales.dtype == Dtype::bf16) return ScaleType::bf16;
  if (scales.dtype == Dtype::f16) return ScaleType::f16;
  refuse(Refusal::dialect_part, claims.place(scales),
         described(scales) + " for scales of F16 or BF16");
}

}  // namespace

WeightInfo& Int4Words::add(Claims& claims, const TensorInfo& words) const {
  const int plain = 1 - packed;
  if (words.dtype != Dtype::i32 || words.shape.rank() != 2 || words.shape[plain] % kInAWord != 0)
    refuse(Refusal::dialect_part, claims.place(words),
           formatted("{} for I32 of two dimensions, size {} a multiple of 8", described(words),
                     plain));
  const std::int64_t unpacked = size_of(claims, words, packed, kInAWord);
  const Shape shape =
      packed == 0 ? Shape{words.shape[1], unpacked} : Shape{unpacked, words.shape[0]};
  const std::string module = words.name.substr(0, words.name.size() - kInt4Codes.size());
  const TensorInfo* const scales = claims.find(module + ".scales");
  if (scales == nullptr)
    refuse(Refusal::dialect_part, claims.place(words), "no " + in_quotes(module + ".scales"));
  Storage storage{.codes = Codes::int4,
                  .scaling = {.kind = Scaling::Kind::row, .zero = Zero::code}};
  if (group != 0)
    storage.scaling = {.kind = Scaling::Kind::block,
                       .block = static_cast<std::int32_t>(group),
                       .zero = Zero::code};
  storage.scaling.type = scale_type(claims, *scales);
  const std::int64_t rows = shape[0];
  const std::int64_t groups = group == 0 ? 1 : ceil_div(shape[1], group);
  try {
    (void)layout(storage, shape);
  } catch (const Error& error) {
    refuse(Refusal::dialect_part, claims.place(words), in_quotes(error.what()));
  }
  const auto part = [&](const char* name, Dtype dtype, const Shape& wanted) {
    return claims.part(Refusal::dialect_part, words, {module + name, dtype, wanted, {}}).name;
  };
  std::vector<std::string> parts{words.name};
  parts.push_back(part(".scales", scales->dtype, Shape{groups, rows}));
  parts.push_back(part(".qzeros", Dtype::i32, Shape{groups, rows / kInAWord}));
  const std::string name = module + ".weight";
  const auto compute = claims.source().config->compute();
  WeightInfo& made = claims.add(name, storage, shape, std::move(parts), compute);
  made.forms = {codes, kScales, zeros};
  return made;
}

bool Int4Words::write(Wording& wording, const WeightInfo& weight) const {
  const Scaling& scaling = weight.storage.scaling;
  const bool grouped = scaling.kind == Scaling::Kind::row || scaling.kind == Scaling::Kind::block;
  const bool halves = scaling.type == ScaleType::f16 || scaling.type == ScaleType::bf16;
  const std::string_view module = module_of(weight.name);
  if (weight.storage.codes != Codes::int4 || scaling.zero != Zero::code || !grouped || !halves)
    return false;
  if (weight.shape.rank() != 2 || !weight.name.ends_with(".weight")) return false;
  if (weight.shape[0] % kInAWord != 0 || weight.shape[1] % kInAWord != 0) return false;
  const Layout made = layout(weight.storage, weight.shape);
  const Dtype type = scaling.type == ScaleType::f16 ? Dtype::f16 : Dtype::bf16;
  const auto add = [&](std::string_view name, Dtype dtype, std::size_t part, const PartForm& form) {
    wording.add_part(formatted("{}{}", module, name), dtype,
                     tensor_shape(form, made.parts[part].shape), static_cast<int>(part), form);
  };
  add(kInt4Codes, Dtype::i32, 0, codes);
  add(".scales", type, 1, kScales);
  add(".qzeros", Dtype::i32, 2, zeros);
  return true;
}

std::int64_t int4_group_said(const Storage& storage) {
  return storage.scaling.kind == Scaling::Kind::row ? -1 : storage.scaling.block;
}

void check_one_group(const Wording& wording) {
  wording.check_same("group_size", [](const Storage& storage) {
    return std::to_string(int4_group_said(storage));
  });
}

std::int64_t int4_group(const QuantConfig& config, const char* key) {
  const auto said = config.all().find(key);
  if (said == config.all().end()) config.refuse(formatted("no {}", key));
  if (*said == -1) return 0;
  const bool legal = said->is_number_unsigned() && *said != 0;
  try {
    if (legal)
      return parse_storage(formatted("int4:block{}", said->get<std::uint64_t>())).scaling.block;
  } catch (const Error&) {
  }
  config.refuse(formatted("{} {}", key, in_quotes(said->dump())));
}

}  // namespace stowage::dialects
