// SPDX-License-Identifier: Apache-2.0
// Storage strings, `codes[:dialect][:scaling][:type][:zero][:actorder|:nested|:transposed|:row|
// :row2]`, the rules of what may be combined, and the integer that stands for a storage across a
// language door. The field of zeros is zero, zero_sum or zero_rounded.
#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <optional>
#include <vector>

#include "format/legal.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

using Kind = Scaling::Kind;
constexpr Scaling kTorchao{.kind = Kind::block,
                           .block = 64,
                           .nested = true,
                           .type = ScaleType::of_values,
                           .scaler_block = 256};
// By ScaleType; one has no name.
constexpr std::array<std::string_view, 11> kTypeNames{
    "f32",  "bf16",      "f16",           "f64",   "",      "e8m0",
    "e4m3", "e4m3_bf16", "e4m3_quotient", "super", "absmax"};

// By Zero; what is always there, or never, has no name.
constexpr std::array<std::string_view, 5> kZeroNames{"", "zero", "", "zero_sum", "zero_rounded"};

constexpr std::string_view kTransposed = ":transposed";

// Which scales stand under one number, behind what these stand under is.
struct Outer {
  std::string_view ending;
  Kind kind;
};
constexpr std::array kOuters{Outer{":row", Kind::row}, Outer{":row2", Kind::row2}};

// What the field calls some storages. Those that strings of ours spelled before they had a name
// keep that spelling, which files hold.
struct Named {
  std::string_view name;
  Storage storage;
  bool canonical;
};
constexpr Scaling kMicroscaled{.kind = Kind::block, .block = 32, .type = ScaleType::e8m0};
constexpr std::array kNamed{
    Named{"mxfp4", {Codes::f4_e2m1, Dialect::standard, kMicroscaled}, true},
    Named{"nvfp4",
          {Codes::f4_e2m1,
           Dialect::standard,
           {.kind = Kind::block, .block = 16, .type = ScaleType::e4m3}},
          true},
    Named{"mxfp8_e4m3", {Codes::f8_e4m3, Dialect::standard, kMicroscaled}, false},
    Named{"mxfp8_e5m2", {Codes::f8_e5m2, Dialect::standard, kMicroscaled}, false},
    Named{"q4_k",
          {Codes::uint4,
           Dialect::standard,
           {.kind = Kind::block, .block = kSuperblock, .type = ScaleType::super}},
          true},
    Named{"q6_k",
          {Codes::int6,
           Dialect::standard,
           {.kind = Kind::block, .block = kSuperblock, .type = ScaleType::super}},
          true},
    Named{"mxint8", {Codes::int8, Dialect::standard, kMicroscaled}, false},
};

// The text up to the next colon, which is taken off `rest`; nothing when the text is used up.
std::optional<std::string_view> next_field(std::optional<std::string_view>& rest) {
  if (!rest) return std::nullopt;
  const std::size_t colon = rest->find(':');
  const std::string_view field = rest->substr(0, colon);
  if (colon == std::string_view::npos)
    rest.reset();
  else
    rest = rest->substr(colon + 1);
  return field;
}

// N of a field such as "block<N>".
std::optional<std::int32_t> number_after(std::string_view word, std::string_view field) {
  if (!field.starts_with(word)) return std::nullopt;
  const std::string_view digits = field.substr(word.size());
  if (digits.empty() || digits[0] < '1' || digits[0] > '9') return std::nullopt;
  std::int32_t n = 0;
  const char* end = digits.data() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.data(), end, n);
  if (error != std::errc{} || stopped != end) return std::nullopt;
  return n;
}

std::optional<Scaling> scaling_from(std::string_view field) {
  if (field == "none") return Scaling{};
  if (field == "tensor") return Scaling{.kind = Kind::tensor};
  if (field == "row") return Scaling{.kind = Kind::row};
  if (field == "row2") return Scaling{.kind = Kind::row2};
  if (const auto n = number_after("block", field)) return Scaling{.kind = Kind::block, .block = *n};
  if (const auto n = number_after("column", field))
    return Scaling{.kind = Kind::column, .block = *n};
  const std::size_t by = field.find('x');
  const auto m = number_after("block", field.substr(0, by));
  if (!m || by == std::string_view::npos) return std::nullopt;
  const auto n = number_after("x", field.substr(by));
  if (!n) return std::nullopt;
  return Scaling{.kind = Kind::block2, .block = *n, .rows = *m};
}

std::optional<ScaleType> type_from(std::string_view field) {
  const auto name = std::ranges::find(kTypeNames, field);
  if (field.empty() || name == kTypeNames.end()) return std::nullopt;
  return static_cast<ScaleType>(name - kTypeNames.begin());
}

Zero zero_from(std::string_view field) {
  const auto name = std::ranges::find(kZeroNames, field);
  if (field.empty() || name == kZeroNames.end()) return Zero::none;
  return static_cast<Zero>(name - kZeroNames.begin());
}

std::string_view spell(Zero zero) {
  const auto at = static_cast<std::size_t>(zero);
  return at < kZeroNames.size() ? kZeroNames[at] : "";
}

std::string_view spell(ScaleType type) {
  const auto at = static_cast<std::size_t>(type);
  return at < kTypeNames.size() ? kTypeNames[at] : "?";  // errors show what no storage has
}

std::string spell(const Scaling& scaling) {
  switch (scaling.kind) {
    case Kind::none:
      return "none";
    case Kind::tensor:
      return "tensor";
    case Kind::row:
      return "row";
    case Kind::row2:
      return "row2";
    case Kind::column:
      return "column" + std::to_string(scaling.block);
    case Kind::block:
    case Kind::block2:
      break;
  }
  std::string text = "block";
  if (scaling.kind == Kind::block2) text.append(std::to_string(scaling.rows)).append("x");
  return text.append(std::to_string(scaling.block));
}

// What may follow "nf4:torchao": block<N>, scaler<N> and the dtype, each or none, in this order.
std::optional<Storage> read_torchao(Codes codes, std::optional<std::string_view>& rest) {
  Storage storage{codes, Dialect::torchao, kTorchao};
  auto field = next_field(rest);
  if (const auto n = number_after("block", field.value_or(""))) {
    storage.scaling.block = *n;
    field = next_field(rest);
  }
  if (const auto n = number_after("scaler", field.value_or(""))) {
    storage.scaling.scaler_block = *n;
    field = next_field(rest);
  }
  if (field) {
    const auto type = type_from(*field);
    if (!type) return std::nullopt;
    storage.scaling.type = *type;
  }
  if (rest || !is_legal(storage)) return std::nullopt;
  return storage;
}

std::string spell_torchao(const Scaling& scaling) {
  std::string text = ":torchao";
  if (scaling.block != kTorchao.block) text.append(":").append(spell(scaling));
  if (scaling.scaler_block != kTorchao.scaler_block)
    text.append(":scaler").append(std::to_string(scaling.scaler_block));
  if (scaling.type != ScaleType::of_values) text.append(":").append(spell(scaling.type));
  return text;
}

std::optional<Storage> read(std::string_view text) {
  if (text.ends_with(kTransposed)) {
    auto turned = read(text.substr(0, text.size() - kTransposed.size()));
    if (!turned || turned->scaling.transposed) return std::nullopt;
    turned->scaling.transposed = true;
    return is_legal(*turned) ? turned : std::nullopt;
  }
  for (const auto& [ending, kind] : kOuters) {
    if (!text.ends_with(ending)) continue;
    auto under = read(text.substr(0, text.size() - ending.size()));
    if (!under || !stand_under_one(under->scaling.type)) continue;  // it says what shares a scale
    if (under->scaling.outer != Kind::none) return std::nullopt;
    under->scaling.outer = kind;
    return under;
  }
  if (const auto named = std::ranges::find(kNamed, text, &Named::name); named != kNamed.end())
    return named->storage;
  std::optional<std::string_view> rest = text;
  auto field = next_field(rest);
  const auto row = std::ranges::find(formats(), *field, &FormatTrait::name);
  if (row == formats().end()) return std::nullopt;
  Storage storage{row->codes, Dialect::standard, row->default_scaling};
  field = next_field(rest);
  if (field == "torchao") return read_torchao(row->codes, rest);
  if (const auto scaling = scaling_from(field.value_or(""))) {
    storage.scaling = *scaling;
    field = next_field(rest);
  }
  if (const auto type = type_from(field.value_or("")); type && type != ScaleType::f32) {
    storage.scaling.type = *type;
    field = next_field(rest);
  }
  if (const Zero zero = zero_from(field.value_or("")); zero != Zero::none) {
    storage.scaling.zero = zero;
    field = next_field(rest);
  }
  if (field == "actorder") {
    storage.scaling.actorder = true;
    field = next_field(rest);
  }
  if (field == "nested") {
    storage.scaling.nested = true;
    field = next_field(rest);
  }
  if (field || rest || !is_legal(storage)) return std::nullopt;
  return storage;
}

std::string refusal(std::string_view where, std::string_view got) {
  return std::string(where) + ": must be one of " + legal_storages() + "; got '" +
         std::string(got) + "'";
}

bool is_power_within(std::int32_t n, std::int32_t least, std::int32_t most) noexcept {
  return n >= least && n <= most && std::has_single_bit(static_cast<std::uint32_t>(n));
}

bool is_legal_block(const Legal& legal, std::int32_t n) noexcept {
  if (legal.powers) return is_power_within(n, legal.least_block, legal.most_block);
  return n >= legal.least_block && n <= legal.most_block && n % legal.step == 0;
}

bool is_legal_type(const Legal& legal, const Scaling& s) noexcept {
  if (s.type == ScaleType::super)
    return legal.super && s.kind == Kind::block && s.block == kSuperblock;
  if (s.type == ScaleType::e8m0)
    return legal.typed && (s.kind == Kind::block || s.kind == Kind::block2);
  if (stand_under_one(s.type)) return legal.product && s.kind == Kind::block;
  if (s.type == ScaleType::absmax)
    return legal.absmax && s.zero == Zero::none &&
           (s.kind == Kind::tensor || s.kind == Kind::row || s.kind == Kind::row2);
  if (s.type == ScaleType::bf16 || s.type == ScaleType::f16)
    return legal.typed && s.kind != Kind::none;
  return s.type == ScaleType::f32;
}

// Of scales whose type is legal.
bool is_legal_zero(const Legal& legal, const Scaling& s) noexcept {
  const bool numbers = s.type <= ScaleType::f16 && s.kind != Kind::none && !s.actorder;
  switch (s.zero) {
    case Zero::none:
      return !legal.rounded || s.type == ScaleType::super;
    case Zero::code:
      return legal.zero && s.type <= ScaleType::f16;
    case Zero::offset:
      return false;  // always there, or never
    case Zero::sum:
      return legal.sum && numbers;
    case Zero::rounded:
      return legal.rounded && numbers;
  }
  return false;
}

// A row of the text that errors show: "nf4[:block<N>][:nested]".
std::string spelled(const FormRow& row) {
  std::string text(trait(row.codes).name);
  if (row.dialect == Dialect::torchao) text += ":torchao";
  const auto has = [&](Kind kind) { return (row.legal.kinds >> static_cast<int>(kind) & 1) != 0; };
  if (row.legal.super && row.legal.rounded)
    text.append("[:block256][:super], ").append(trait(row.codes).name);
  if (has(Kind::tensor))
    text.append("[:tensor|:row|:row2|:block<N>|:block<M>x<N>")
        .append(has(Kind::column) ? "|:column<N>]" : "]");
  else if (has(Kind::block))
    text += "[:block<N>]";
  if (row.legal.typed)
    text += row.legal.product   ? "[:bf16|:f16|:e8m0|:e4m3|:e4m3_bf16|:e4m3_quotient]"
            : row.legal.rounded ? "[:bf16|:f16]"
            : row.legal.super   ? "[:bf16|:f16|:e8m0|:super]"
            : row.legal.absmax  ? "[:bf16|:f16|:e8m0|:absmax]"
                                : "[:bf16|:f16|:e8m0]";
  if (row.legal.product) text += "[:row|:row2]";
  if (row.legal.zero) text += row.legal.sum ? "[:zero|:zero_sum]" : "[:zero]";
  if (row.legal.rounded) text += ":zero_rounded";
  if (row.legal.named) text += "[:actorder]";
  if (row.legal.nested) text += "[:nested]";
  if (row.legal.transposed) text.append("[").append(kTransposed).append("]");
  if (row.legal.open) text += "[:scaler<M>][:f32|:bf16|:f16|:f64]";
  return text;
}

// "nf4 and fp4": the formats whose own rows have this rule.
template <class T>
std::string names_with(T Legal::*rule, T has) {
  std::vector<std::string_view> names;
  for (const FormRow& row : form_rows())
    if (row.dialect == Dialect::standard && row.legal.*rule == has)
      names.push_back(trait(row.codes).name);
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text.append(i == 0 ? "" : i + 1 == names.size() ? " and " : ", ").append(names[i]);
  return text;
}

}  // namespace

bool is_legal(const Storage& storage) noexcept {
  const Scaling& s = storage.scaling;
  const FormRow* const row = form_row(storage.codes, storage.dialect);
  if (row == nullptr || s.kind > Kind::column) return false;
  const Legal& legal = row->legal;
  if ((legal.kinds >> static_cast<int>(s.kind) & 1) == 0) return false;
  const bool blocks = s.kind >= Kind::block;
  if (blocks ? !is_legal_block(legal, s.block) : s.block != 0) return false;
  if (s.kind == Kind::block2 ? !is_power_within(s.rows, kMinRows, kMaxRows) : s.rows != 0)
    return false;
  const bool outer = s.outer == Kind::row || s.outer == Kind::row2;
  if (outer ? !stand_under_one(s.type) : s.outer != Kind::none) return false;
  if (s.transposed && (!legal.transposed || s.kind != Kind::block || s.type >= ScaleType::e4m3))
    return false;
  if (s.actorder && (!legal.named || s.kind != Kind::block || s.type > ScaleType::f16))
    return false;
  if (legal.open)
    return s.nested && s.type <= ScaleType::of_values && s.zero == Zero::none &&
           is_power_within(s.scaler_block, kMinScalerBlock, kMaxScalerBlock);
  if (!is_legal_type(legal, s) || !is_legal_zero(legal, s)) return false;
  return (legal.nested || !s.nested) && s.scaler_block == 0;
}

bool can_keep_nonfinite(const Storage& storage) {
  const Descriptor form = describe(storage);
  return form.codec == Codec::cast ||
         (form.codec == Codec::bitsandbytes && form.scale.code == ScaleCode::plain);
}

void check_quantizable(const Storage& storage) {
  if (!storage.scaling.actorder) return;
  Storage plain = storage;
  plain.scaling.actorder = false;
  throw Error(Code::invalid_argument,
              "quantize: storage must have groups that values alone make, such as " +
                  to_string(plain) + ", got " + to_string(storage) +
                  ", whose columns are in an order that comes with a file");
}

void check_legal(const Storage& storage, const char* where) {
  if (is_legal(storage)) return;
  const auto codes = static_cast<int>(storage.codes);
  std::string got = std::to_string(codes);
  if (codes < kCodesCount) got = to_string(storage);
  throw Error(Code::invalid_argument, refusal(std::string(where) + ": storage", got));
}

inline namespace v0 {

Storage parse_storage(std::string_view text) {
  const auto storage = read(text);
  if (!storage) throw Error(Code::invalid_argument, refusal("storage", text));
  return *storage;
}

std::string to_string(const Storage& storage) {
  if (storage.scaling.transposed) return to_string(lying(storage)).append(kTransposed);
  if (const auto outer = std::ranges::find(kOuters, storage.scaling.outer, &Outer::kind);
      outer != kOuters.end()) {
    Storage of_all = storage;
    of_all.scaling.outer = Kind::none;
    return to_string(of_all).append(outer->ending);
  }
  for (const Named& named : kNamed)
    if (named.canonical && named.storage == storage) return std::string(named.name);
  std::string text(trait(storage.codes).name);
  if (storage.dialect == Dialect::torchao) return text + spell_torchao(storage.scaling);
  if (storage.scaling.kind != Kind::none) text.append(":").append(spell(storage.scaling));
  if (storage.scaling.type != ScaleType::f32) text.append(":").append(spell(storage.scaling.type));
  if (storage.scaling.zero != Zero::none) text.append(":").append(spell(storage.scaling.zero));
  if (storage.scaling.actorder) text += ":actorder";
  return storage.scaling.nested ? text + ":nested" : text;
}

std::string legal_storages() {
  std::string text;
  for (const FormatTrait& format : formats())
    for (const FormRow& row : form_rows())
      if (row.codes == format.codes) text += (text.empty() ? "" : ", ") + spelled(row);
  for (const Named& named : kNamed) text.append(", ").append(named.name);
  return text + " (N: " + std::to_string(kMinBlock) + " to " + std::to_string(kMaxBlock) +
         ", for " + names_with(&Legal::step, 2) + " an even one, for " +
         names_with(&Legal::step, 8) + " a multiple of 8; for " + names_with(&Legal::powers, true) +
         " a power of two from " + std::to_string(kMinBlock4) + " to " +
         std::to_string(kMaxBlock4) + ", for nf4:torchao from " + std::to_string(kMinBlockTorchao) +
         "; e8m0: with blocks; e4m3 and actorder: with block<N>; a second row or row2: behind "
         "e4m3; zero_sum: without actorder; "
         "absmax: without blocks; super: with block256; transposed: with block<N> but e4m3; M: a "
         "power of two from " +
         std::to_string(kMinScalerBlock) + " to " + std::to_string(kMaxScalerBlock) +
         ", of block<M>x<N> from " + std::to_string(kMinRows) + ")";
}

// bits   0-7 codes | 8-9 dialect | 10-11 outer kind | 12-15 scaling kind | 16-19 scale type | 20
// nested |
//        22 actorder | 23 transposed | 24-54 block
//        56-59 scaler block, or M of block<M>x<N>: 0 for none, else 1 + its logarithm | 60-62 zero
std::int64_t storage_key(const Storage& storage) noexcept {
  const Scaling& s = storage.scaling;
  return static_cast<std::int64_t>(storage.codes) |
         static_cast<std::int64_t>(storage.dialect) << 8 |
         static_cast<std::int64_t>(s.outer) << 10 | static_cast<std::int64_t>(s.kind) << 12 |
         static_cast<std::int64_t>(s.type) << 16 | static_cast<std::int64_t>(s.nested) << 20 |
         static_cast<std::int64_t>(s.zero) << 60 | static_cast<std::int64_t>(s.actorder) << 22 |
         static_cast<std::int64_t>(s.transposed) << 23 | static_cast<std::int64_t>(s.block) << 24 |
         static_cast<std::int64_t>(
             std::bit_width(static_cast<std::uint32_t>(s.scaler_block | s.rows)))
             << 56;
}

Storage storage_from_key(std::int64_t key) {
  Storage storage;
  storage.codes = static_cast<Codes>(key & 0xff);
  storage.dialect = static_cast<Dialect>(key >> 8 & 3);
  storage.scaling.outer = static_cast<Kind>(key >> 10 & 3);
  storage.scaling.kind = static_cast<Kind>(key >> 12 & 0xf);
  storage.scaling.type = static_cast<ScaleType>(key >> 16 & 0xf);
  storage.scaling.nested = (key >> 20 & 1) != 0;
  storage.scaling.zero = static_cast<Zero>(key >> 60 & 7);
  storage.scaling.actorder = (key >> 22 & 1) != 0;
  storage.scaling.transposed = (key >> 23 & 1) != 0;
  storage.scaling.block = static_cast<std::int32_t>(key >> 24 & 0x7fffffff);
  Scaling& s = storage.scaling;
  if (const auto width = static_cast<int>(key >> 56 & 0xf); width != 0)
    (s.kind == Kind::block2 ? s.rows : s.scaler_block) = std::int32_t{1} << (width - 1);
  if (!is_legal(storage) || storage_key(storage) != key)
    throw Error(Code::invalid_argument,
                "storage key: must come from storage_key(), got " + std::to_string(key));
  return storage;
}

Storage storage_for_values(const Storage& storage, Dtype values) noexcept {
  Storage made = storage;
  if (storage.scaling.type != ScaleType::of_values) return made;
  if (values == Dtype::f32) made.scaling.type = ScaleType::f32;
  if (values == Dtype::bf16) made.scaling.type = ScaleType::bf16;
  if (values == Dtype::f16) made.scaling.type = ScaleType::f16;
  if (values == Dtype::f64) made.scaling.type = ScaleType::f64;
  return made;
}

}  // namespace v0
}  // namespace stowage
