// SPDX-License-Identifier: Apache-2.0
// compressed-tensors 0.15 to 0.20, by the configuration beside the files:
//   W              F8_E4M3 or I8 [O, K]; in the formats that end in pack-quantized there is
//   W_packed       instead, U8 [O, K / 2] or I32 [O, K / 8], the first column in the lowest bits
//   W_scale        of the model's dtype: [] or [1], [O, 1], [O, K / group_size], or one for each
//                  block of block_structure; in the formats of mx U8 exponents [O, K / 32];
//                  in nvfp4-pack-quantized F8_E4M3 [O, K / 16], which are divided by
//   W_global_scale F32 [1]
// And in pack-quantized, whose integers are of 2 to 8 bits:
//   W_packed       I32, whose rows are strings of bits, from the lowest up; in older releases
//                  (0.15) words of whole integers: 3, 5, 6 and 7 bits then have another width,
//                  which alone tells
//   W_shape        I64 [2]: O, K, which need not fill the last word of a row
//   W_zero_point   I32 where they are not symmetric: the same, down the columns of the scales
//   W_g_idx        I32 [K] where columns are in another order than their groups: that of each
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/groups.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace compressed_tensors {
namespace {

using Json = nlohmann::json;
constexpr std::string_view kWeightScale = ".weight_scale", kScale = "_scale";
constexpr std::string_view kOuter = "_global_scale", kZeroPoint = "_zero_point",
                           kUnder = ":e4m3_quotient", kGroups = "_g_idx";
constexpr std::string_view kPacked = "_packed";         // behind the name of a weight
constexpr std::string_view kMixed = "mixed-precision";  // each group says its own format

// Integers in words of 32 bits, whose codes in parts are biased too but for those of int8.
struct Words {
  int bits;
  bool string = true;  // they go on in the next word; else each has whole ones

  bool fills() const { return 32 % bits == 0; }  // both readings are one
  std::int64_t run() const { return 32 / bits; }
  // Words for so many; more than any tensor has where no size is.
  std::int64_t count(std::int64_t numbers) const {
    if (!string || fills()) return ceil_div(numbers, run());
    const auto all = checked_mul<std::int64_t>(numbers, bits);
    return all ? ceil_div<std::int64_t>(*all, 32) : std::numeric_limits<std::int64_t>::max();
  }
  PartForm codes(std::int64_t columns) const {
    if (count(columns) * 32 == columns * bits && (string || fills()) && bits != 8) return {};
    const auto width = static_cast<std::uint8_t>(bits);
    return {.in_file = width,
            .in_part = width,
            .word = 32,
            .bias = static_cast<std::uint8_t>(bits == 8 ? 128 : 0),
            .string = string && !fills()};
  }
  PartForm zeros() const {
    return {.in_file = static_cast<std::uint8_t>(bits),
            .in_part = 8,
            .word = 32,
            .axis = PartForm::Axis::rows,
            .bias = static_cast<std::uint8_t>(1 << (bits - 1)),
            .string = string && !fills()};
  }
};
bool has_words(Codes codes) { return trait(codes).name.starts_with("int"); }

struct Format {
  std::string_view name;
  int num_bits = 8;
  bool exponents = false;
  std::string_view codes = "";   // behind the name of the weight
  bool words = false;            // of 32 bits, with integers in them
  std::string_view scales = "";  // in the string of a storage, where their tensor does not tell it
};
constexpr std::array<Format, 7> kFormats{
    {{"float-quantized"},
     {"int-quantized"},
     {"naive-quantized"},
     {"mxfp8-quantized", 8, true},
     {"mxfp4-pack-quantized", 4, true, kPacked},
     {"nvfp4-pack-quantized", 4, false, kPacked, false, kUnder},
     {"pack-quantized", 4, false, kPacked, true}}};

struct Scheme {
  const Format* format = nullptr;
  Storage storage;
  std::vector<std::string> targets;
  bool operator==(const Scheme& other) const {
    return storage == other.storage && format == other.format;
  }
};

const Format& format_of(const QuantConfig& config, const std::string& said) {
  const auto at = std::ranges::find(kFormats, said, &Format::name);
  if (at == kFormats.end()) config.refuse("format " + in_quotes(said));
  return *at;
}

// "" where it is absent or null.
std::string text_of(const QuantConfig& config, const Json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return "";
  if (!at->is_string()) config.refuse(formatted("{} {}", key, in_quotes(at->dump())));
  return at->get<std::string>();
}

// The modules of a group: all where it names none.
std::vector<std::string> targets_of(const QuantConfig& config, const Json& group) {
  std::vector<std::string> found;
  const auto targets = group.find("targets");
  if (targets == group.end() || targets->is_null()) return found;
  const auto is_text = [](const Json& target) { return target.is_string(); };
  if (!targets->is_array() || !std::ranges::all_of(*targets, is_text))
    config.refuse("targets " + in_quotes(targets->dump()));
  for (const Json& target : *targets) found.push_back(target.get<std::string>());
  return found;
}

// [128, 128] as "128x128".
std::string block_text(const QuantConfig& config, const Json& weights) {
  const auto at = weights.find("block_structure");
  const bool legal = at != weights.end() && at->is_array() && at->size() == 2 &&
                     (*at)[0].is_number_unsigned() && (*at)[1].is_number_unsigned();
  if (!legal) config.refuse("a strategy 'block' without a block_structure of two numbers");
  return formatted("block{}x{}", (*at)[0].get<std::uint64_t>(), (*at)[1].get<std::uint64_t>());
}

std::string scaling_text(const QuantConfig& config, const Format& format, const Json& weights) {
  const std::string strategy = text_of(config, weights, "strategy");
  if (format.scales.empty()) {
    if (strategy == "tensor") return "tensor";
    if (strategy == "channel") return "row";
    if (strategy == "block") return block_text(config, weights);
  }
  const auto size = weights.find("group_size");
  const char* const groups = format.scales.empty() ? "group" : "tensor_group";
  if (strategy == groups && size != weights.end() && size->is_number_unsigned())
    return formatted("block{}", size->get<std::uint64_t>());
  config.refuse("strategy " + in_quotes(strategy) + " of weights");
}

std::string codes_of(int num_bits, bool integer) {
  if (integer) return formatted("int{}", num_bits);
  return num_bits == 4 ? "f4_e2m1" : "f8_e4m3";
}

bool has_bits(const Format& format, const Json& bits) {
  if (!format.words) return bits == format.num_bits;
  return bits.is_number_unsigned() && bits >= 2 && bits <= 8;
}

Scheme scheme_of(const QuantConfig& config, const std::string& format, const Json& group) {
  const auto weights = group.is_object() ? group.find("weights") : group.end();
  if (!group.is_object() || weights == group.end() || !weights->is_object())
    config.refuse("a group of config_groups without weights");
  const std::string own = text_of(config, group, "format");
  const Format& read = format_of(config, own.empty() ? format : own);
  const auto bits = weights->find("num_bits"), symmetric = weights->find("symmetric");
  if (bits == weights->end() || !has_bits(read, *bits))
    config.refuse(formatted("{} of weights of other than {} num_bits", read.name,
                            read.words ? "2 to 8" : std::to_string(read.num_bits)));
  const int num_bits = bits->get<int>();
  const bool zeros = symmetric != weights->end() && *symmetric != true;
  if (zeros && (*symmetric != false || !read.words))
    config.refuse("weights with symmetric " + in_quotes(symmetric->dump()));
  const std::string type = text_of(config, *weights, "type");
  const bool integer = type == "int" && (read.words || read.num_bits == 8);
  if (!integer && (type != "float" || read.words))
    config.refuse("type " + in_quotes(type) + " of weights");
  Scheme made{.format = &read, .storage = {}, .targets = targets_of(config, group)};
  const std::string codes = codes_of(num_bits, integer);
  const std::string storage = formatted("{}:{}{}{}", codes, scaling_text(config, read, *weights),
                                        read.scales, zeros ? ":zero" : "");
  try {
    made.storage = parse_storage(storage);
  } catch (const Error&) {
    config.refuse("weights of " + in_quotes(storage));
  }
  return made;
}

std::vector<Scheme> schemes_of(const QuantConfig& config) {
  const std::string format = config.text("format").value_or("");
  if (format != kMixed) format_of(config, format);
  const auto groups = config.all().find("config_groups");
  if (groups == config.all().end() || !groups->is_object() || groups->empty())
    config.refuse("no config_groups");
  std::vector<Scheme> found;
  for (const auto& [key, group] : groups->items())
    found.push_back(scheme_of(config, format, group));
  return found;
}

// Of several groups, the one that names the module; patterns are not read, so that groups that
// differ must name modules, but one may be of all that are not named.
const Scheme& scheme_for(const QuantConfig& config, const std::vector<Scheme>& all,
                         std::string_view module) {
  const auto same = [&](const Scheme& scheme) { return scheme == all.front(); };
  if (std::ranges::all_of(all, same)) return all.front();
  const Scheme* rest = nullptr;
  for (const Scheme& scheme : all) {
    for (const std::string& target : scheme.targets) {
      if (target == module) return scheme;
      if (target.starts_with("re:")) config.refuse("groups that differ, by " + in_quotes(target));
      if (target == "Linear") rest = &scheme;
    }
  }
  if (rest == nullptr)
    config.refuse(formatted("no group of config_groups for {}", in_quotes(module)));
  return *rest;
}

void set_forms(ScaledCodes& weight, const Words& words, std::int64_t columns) {
  weight.codes_in = Dtype::i32;
  weight.codes_form = words.codes(columns);
  weight.third_form = words.zeros();
}

// Which of the two readings the widths of the codes and of the zero points have; where both have
// them and read other numbers, or none does, both are named.
Words reading_of(const Claims& claims, const ScaledCodes& weight, const TensorInfo& codes,
                 const TensorInfo& said, const Shape& shape) {
  const Words all[] = {{trait(weight.storage.codes).bits, true},
                       {trait(weight.storage.codes).bits, false}};
  const TensorInfo* const zeros =
      weight.storage.scaling.zero != Zero::none ? claims.find(weight.third) : nullptr;
  const auto has_zeros = [&](const Words& words) {
    return zeros == nullptr || zeros->shape.rank() == 0 || words.count(shape[0]) == zeros->shape[0];
  };
  const auto fits = [&](const Words& words) {
    return shape[0] == codes.shape[0] && words.count(shape[1]) == codes.shape[1];
  };
  const auto [string, whole] = all;
  const std::string both = formatted(
      "{} for {}: {} columns of {} bits are {} words as one string, {} of {} columns each",
      to_string(shape), described(codes), shape[1], string.bits, string.count(shape[1]),
      whole.count(shape[1]), whole.run());
  if (!fits(string) && !fits(whole)) {
    if (!string.fills()) refuse(Refusal::dialect_part, claims.place(said), both);
    refuse(
        Refusal::dialect_part, claims.place(said),
        formatted("{} for {}, {} columns each", to_string(shape), described(codes), string.run()));
  }
  if (fits(string) != fits(whole) || string.fills()) return fits(string) ? string : whole;
  if (has_zeros(string) != has_zeros(whole)) return has_zeros(string) ? string : whole;
  const bool same = shape[1] <= string.run() && (zeros == nullptr || shape[0] <= string.run());
  if (!same) refuse(Refusal::dialect_part, claims.place(codes), both + ", and nothing tells which");
  return string;
}

// The shape that W_shape says, which the words of the codes must have room for and no more.
void set_words(const Claims& claims, ScaledCodes& weight) {
  weight.codes_in = Dtype::i32;
  const TensorInfo* const codes = claims.find(weight.codes);
  if (codes == nullptr) return;  // which add() refuses
  if (codes->shape.rank() != 2)
    refuse(Refusal::dialect_part, claims.place(*codes), described(*codes) + " for two dimensions");
  size_of(claims, *codes, 1, Words{trait(weight.storage.codes).bits}.run());
  const TensorInfo& said = claims.part(Refusal::dialect_part, *codes,
                                       {weight.name + "_shape", Dtype::i64, Shape{2}, {}});
  std::array<std::int64_t, 2> sizes{};
  std::memcpy(sizes.data(), claims.read(said).data(), sizeof sizes);
  try {
    weight.logical = Shape(sizes);
  } catch (const Error& error) {
    refuse(Refusal::dialect_part, claims.place(said), in_quotes(error.what()));
  }
  set_forms(weight, reading_of(claims, weight, *codes, said, *weight.logical), sizes[1]);
}

ScaledCodes coded(const std::string& name, const Format& format) {
  ScaledCodes weight{.name = name, .codes = name, .scale = name + std::string(kScale)};
  weight.codes += format.codes;
  weight.bytes_are_exponents = format.exponents;
  weight.third = name + std::string(format.scales.empty() ? kZeroPoint : kOuter);
  weight.number = Shape{1};
  return weight;
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  const std::vector<Scheme> all = schemes_of(config);
  for (const TensorInfo& scale : claims.tensors()) {
    if (!scale.name.ends_with(kWeightScale) || claims.is_taken(scale.name)) continue;
    const std::string name = scale.name.substr(0, scale.name.size() - kScale.size());
    const Scheme& scheme = scheme_for(config, all, module_of(name));
    ScaledCodes weight = coded(name, *scheme.format);
    weight.storage = scheme.storage;
    const std::string zero_points = name + std::string(kZeroPoint);
    const TensorInfo* const groups = claims.find(name + std::string(kGroups));
    if (groups != nullptr && !scheme.format->words)
      refuse(Refusal::dialect_part, claims.place(*groups),
             described(*groups) + " for codes that are not in words");
    const TensorInfo* const zeros = claims.find(zero_points);
    if (zeros != nullptr && scheme.format->words && scheme.storage.scaling.zero == Zero::none)
      refuse(Refusal::dialect_part, claims.place(*zeros),
             described(*zeros) + " for weights that are symmetric");
    if (scheme.format->words) set_words(claims, weight);
    WeightInfo& made = weight.add(claims, claims.place(scale));
    if (scheme.format->words)
      claims.add_beside(made, name + "_shape");
    else
      add_zeros(claims, made, zero_points);
    if (groups != nullptr) add_groups(claims, made, groups->name);
    for (const char* other : {"input_scale", "output_scale", "input_global_scale"})
      add_activation_scale(claims, made, other);
    check_not_listed(claims, made, "ignore");
  }
  refuse_unscaled(claims, kScale);
  for (const TensorInfo& outer : claims.tensors())
    if (outer.name.ends_with(formatted(".weight{}", kOuter)) && !claims.is_taken(outer.name))
      refuse(Refusal::dialect_part, claims.place(outer),
             described(outer) + " over the scales of no weight");
  for (const TensorInfo& codes : claims.tensors())
    if (codes.name.ends_with(kPacked) && !claims.is_taken(codes.name))
      refuse(Refusal::dialect_part, claims.place(codes),
             formatted("no {}", in_quotes(codes.name.substr(0, codes.name.size() - kPacked.size()) +
                                          "_scale")));
}

bool has_codes(const Format& format, Codes codes) {
  if (format.words) return has_words(codes);
  if (format.num_bits == 4) return codes == Codes::f4_e2m1;
  return codes == (format.name == "int-quantized" ? Codes::int8 : Codes::f8_e4m3);
}

bool has_scaling(const Format& format, const Storage& storage) {
  const Scaling& scaling = storage.scaling;
  const bool words_of_rows = format.words && scaling.kind != Scaling::Kind::tensor;
  if (scaling.zero > Zero::code) return false;
  if ((scaling.zero != Zero::none || scaling.actorder) && !words_of_rows) return false;
  if (format.exponents)
    return scaling.type == ScaleType::e8m0 && scaling.kind == Scaling::Kind::block &&
           scaling.block == 32;
  if (!format.scales.empty())
    return scaling.type == ScaleType::e4m3_quotient && scaling.outer == Scaling::Kind::none;
  if (scaling.kind == Scaling::Kind::none || scaling.kind == Scaling::Kind::row2) return false;
  if (scaling.kind == Scaling::Kind::block2 && format.words) return false;
  return scaling.type == ScaleType::f32 || scaling.type == ScaleType::bf16 ||
         scaling.type == ScaleType::f16;
}

// The first row that has the storage; its owner refuses groups that do not fill a row.
const Format* format_for(const Wording& wording, const WeightInfo& weight) {
  const Scaling& scaling = weight.storage.scaling;
  if (weight.shape.rank() != 2 || !weight.name.ends_with(".weight")) return nullptr;
  if (scaling.kind == Scaling::Kind::block && weight.shape[1] % scaling.block != 0) return nullptr;
  const auto at = std::ranges::find_if(kFormats, [&](const Format& format) {
    return wording.asks_for(format.name) && has_codes(format, weight.storage.codes) &&
           has_scaling(format, weight.storage);
  });
  return at == kFormats.end() ? nullptr : &*at;
}

bool write(Wording& wording, const WeightInfo& weight) {
  const Format* const format = format_for(wording, weight);
  if (format == nullptr) return false;
  ScaledCodes made = coded(weight.name, *format);
  made.storage = weight.storage;
  if (format->words) set_forms(made, {.bits = trait(weight.storage.codes).bits}, weight.shape[1]);
  made.write(wording, weight);
  if (weight.storage.scaling.actorder)
    wording.add_part(weight.name + std::string(kGroups), Dtype::i32, Shape{weight.shape[1]},
                     weight.storage.scaling.zero != Zero::none ? 3 : 2);
  if (format->words)
    wording.add_text(weight.name + "_shape", Dtype::i64, Shape{2},
                     bytes_of_numbers(std::vector{weight.shape[0], weight.shape[1]}));
  return true;
}

// What scheme_of() reads as the storage.
Wording::Json group_of(const Format& format, const Storage& storage, bool input_scales) {
  const Scaling& scaling = storage.scaling;
  const bool integer = has_words(storage.codes);
  Wording::Json weights{{"num_bits", trait(storage.codes).bits},
                        {"type", integer ? "int" : "float"},
                        {"symmetric", scaling.zero == Zero::none},
                        {"group_size", nullptr},
                        {"strategy", "tensor"},
                        {"dynamic", false}};
  if (scaling.kind == Scaling::Kind::row) weights["strategy"] = "channel";
  if (scaling.kind == Scaling::Kind::block) {
    weights["strategy"] = format.scales.empty() ? "group" : "tensor_group";
    weights["group_size"] = scaling.block;
  }
  if (scaling.actorder) weights["actorder"] = "group";
  if (scaling.kind == Scaling::Kind::block2) {
    weights["strategy"] = "block";
    weights["block_structure"] = {scaling.rows, scaling.block};
  }
  if (format.exponents) weights["scale_dtype"] = "torch.uint8";
  if (!format.scales.empty()) weights["scale_dtype"] = "torch.float8_e4m3fn";
  Wording::Json inputs;
  if (input_scales)
    inputs = {{"num_bits", 8},        {"type", integer ? "int" : "float"},
              {"symmetric", true},    {"group_size", nullptr},
              {"strategy", "tensor"}, {"dynamic", false}};
  return {{"weights", weights},
          {"input_activations", inputs},
          {"output_activations", nullptr},
          {"format", format.name}};
}

// A group of all linear modules, or, of several, each with the modules that it names.
void finish(Wording& wording) {
  std::map<std::string, std::pair<Wording::Json, Wording::Json>> groups;
  std::vector<std::string_view> formats;
  for (const WeightInfo& weight : wording.weights()) {
    const Format& format = *format_for(wording, weight);
    Wording::Json group = group_of(format, weight.storage, wording.has_input_scales());
    if (std::ranges::count(formats, format.name) == 0) formats.push_back(format.name);
    auto& [of, modules] = groups[group.dump()];
    of = std::move(group);
    modules.push_back(module_of(weight.name));
  }
  Wording::Json said;
  for (auto& [key, group] : groups) {
    Wording::Json one{
        {"targets", groups.size() == 1 ? Wording::Json::array({"Linear"}) : group.second}};
    one.update(group.first);
    said[formatted("group_{}", said.size())] = one;
  }
  wording.set_config({{"config_groups", said},
                      {"quant_method", "compressed-tensors"},
                      {"kv_cache_scheme", nullptr},
                      {"format", formats.size() == 1 ? formats.front() : kMixed},
                      {"quantization_status", "compressed"},
                      {"ignore", wording.plain_modules()}});
}

constexpr auto kForms = [] {
  std::array<std::string_view, kFormats.size()> names;
  std::ranges::transform(kFormats, names.begin(), &Format::name);
  return names;
}();

std::string recognise(const TensorSource&) { return ""; }

}  // namespace
}  // namespace compressed_tensors

const FileDialect kCompressedTensors{"compressed-tensors",          "compressed-tensors",
                                     compressed_tensors::recognise, compressed_tensors::read,
                                     compressed_tensors::write,     compressed_tensors::finish,
                                     compressed_tensors::kForms};

}  // namespace stowage::dialects
