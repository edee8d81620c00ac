// SPDX-License-Identifier: Apache-2.0
// hqq of four bits, by the configuration beside the files. Of n groups in all, a group is
// group_size neighbours of the flat matrix [O, K], axis 1: a row of [n, group_size], or as many
// elements that lie n apart in it, axis 0: a column of [group_size, n]. Of that matrix [R, C],
//   MODULE.W_q          U8 [R / 2, C]: the codes of a row of the first half are in the high halves
//                       of the bytes of its row, those of as far a one of the second in the low
//                       halves
//   MODULE.scale, zero  F16, BF16 or F32 [n, 1], axis 0: [1, n], of the dtype that it computes in
//   MODULE.shape        I64 [2], and what else its reader is told, one tensor each: numbers as I32
//                       [], booleans as U8 [], texts as U8 [length]
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"
#include "stowage/descriptor.h"

namespace stowage::dialects {
namespace hqq {
namespace {

constexpr std::string_view kCodes = ".W_q";
constexpr PartForm kHalves{.in_file = 4,
                           .in_part = 4,
                           .word = 8,
                           .axis = PartForm::Axis::rows,
                           .order = {1, 0, 2, 3, 4, 5, 6, 7},
                           .folded = true};

// What a module says beside its numbers. Other values than `only` are other numbers, or other
// places of them; where there is none, they only tell how codes were found.
struct Setting {
  std::string_view name;
  Dtype dtype;  // u8 of texts too
  std::string_view only, written;
};
constexpr std::array kSettings{
    Setting{"nbits", Dtype::i32, "4", "4"},
    Setting{"channel_wise", Dtype::u8, "1", "1"},
    Setting{"view_as_float", Dtype::u8, "0", "0"},
    Setting{"quant_scale", Dtype::u8, "0", "0"},
    Setting{"quant_zero", Dtype::u8, "0", "0"},
    Setting{"encoded_state_dict", Dtype::u8, "1", "1"},
    Setting{"stores_quant_config", Dtype::u8, "1", "1"},
    Setting{"offload_meta", Dtype::u8, "", "0"},
    Setting{"optimize", Dtype::u8, "", "1"},
    Setting{"round_zero", Dtype::u8, "", "1"},
    Setting{"packing", Dtype::u8, "4bit_u8", "4bit_u8"},
    Setting{"unpack_view_dtype", Dtype::u8, "torch.uint8", "torch.uint8"}};

/// A module, while its tensors are read.
struct Module {
  Claims& claims;
  const TensorInfo& codes;
  std::string name;

  std::string tensor(std::string_view of) const { return formatted("{}.{}", name, of); }
  [[noreturn]] void refuse_at(const TensorInfo& at, const std::string& got) const {
    refuse(Refusal::dialect_part, claims.place(at), got);
  }
  const TensorInfo& found(std::string_view of) const {
    const TensorInfo* const at = claims.find(tensor(of));
    if (at == nullptr) refuse_at(codes, "no " + in_quotes(tensor(of)));
    return *at;
  }
  // The bytes of a setting of `count` numbers, or as many as there are.
  std::string bytes(const TensorInfo& at, Dtype dtype, int rank) const {
    if (at.dtype != dtype || at.shape.rank() != rank || at.bytes > kLongestText)
      refuse_at(at, formatted("{} for a setting of {} in {} dimensions", described(at),
                              disk_name(dtype), rank));
    return claims.read(at);
  }
  template <class Number>
  std::vector<Number> numbers(std::string_view of, Dtype dtype, int rank) const {
    const std::string held = bytes(found(of), dtype, rank);
    std::vector<Number> made(held.size() / sizeof(Number));
    std::memcpy(made.data(), held.data(), made.size() * sizeof(Number));
    return made;
  }
  std::int64_t number(std::string_view of) const {
    return numbers<std::int32_t>(of, Dtype::i32, 0)[0];
  }
  // As `only` of a setting has it.
  std::string said(const Setting& setting, const TensorInfo& at) const {
    if (setting.dtype == Dtype::i32) return std::to_string(number(setting.name));
    const bool text = !setting.only.empty() && setting.only.size() > 1;
    const std::string held = bytes(at, setting.dtype, text ? 1 : 0);
    return text ? held : std::to_string(static_cast<unsigned char>(held[0]));
  }
};

void check_settings(const Module& module) {
  for (const Setting& setting : kSettings) {
    const TensorInfo* const at = module.claims.find(module.tensor(setting.name));
    if (at == nullptr) {
      if (setting.name == "nbits") module.found(setting.name);  // refuses
      continue;
    }
    const std::string said = module.said(setting, *at);
    if (!setting.only.empty() && said != setting.only)
      module.refuse_at(*at, formatted("{} {} for {}", setting.name, in_quotes(said), setting.only));
  }
}

ScaleType type_of(const Module& module, const TensorInfo& scale) {
  switch (scale.dtype) {
    case Dtype::f16:
      return ScaleType::f16;
    case Dtype::bf16:
      return ScaleType::bf16;
    case Dtype::f32:
      return ScaleType::f32;
    default:
      module.refuse_at(scale, described(scale) + " for scales of F16, BF16 or F32");
  }
}

// Its decoder computes in the dtype that its numbers have too.
void check_compute(const Module& module, const TensorInfo& scale) {
  const TensorInfo* const at = module.claims.find(module.tensor("compute_dtype"));
  if (at == nullptr) return;
  const std::string said = module.bytes(*at, Dtype::u8, 1);
  if (said != formatted("torch.{}", torch_name(scale.dtype)))
    module.refuse_at(*at, formatted("compute_dtype {} for scales of {}", in_quotes(said),
                                    disk_name(scale.dtype)));
}

Shape shape_of(const Module& module) {
  const auto sizes = module.numbers<std::int64_t>("shape", Dtype::i64, 1);
  const bool fits = sizes.size() == 2 && sizes[0] > 0 && sizes[1] > 0 &&
                    sizes[0] <= std::numeric_limits<std::int64_t>::max() / sizes[1];
  if (!fits) module.refuse_at(module.found("shape"), "a shape of no matrix");
  return Shape(sizes);
}

/// How a matrix of elements has its groups.
struct Grouping {
  int axis;
  std::int64_t group, groups;
  Grouping(const Storage& storage, const Shape& shape)
      : axis(storage.scaling.kind == Scaling::Kind::column ? 0 : 1),
        group(axis == 0 ? storage.scaling.block : group_elements(storage, shape)),
        groups(shape.elements() / group) {}
  std::int64_t rows() const { return axis == 0 ? group : groups; }
  Shape codes() const { return {rows() / 2, axis == 0 ? groups : group}; }
  Shape numbers() const { return axis == 0 ? Shape{1, groups} : Shape{groups, 1}; }
};

// The groups of a matrix.
Storage storage_of(const Module& module, const Shape& shape, ScaleType type) {
  const TensorInfo& said = module.found("group_size");
  const std::int64_t axis = module.number("axis"), group = module.number("group_size");
  if (axis != 0 && axis != 1)
    module.refuse_at(module.found("axis"), formatted("axis {} for 0 or 1", axis));
  const std::int64_t along = shape[static_cast<int>(axis)];
  if (group <= 0 || along % group != 0)
    module.refuse_at(said, formatted("groups of {} in {} of {}, which they do not fill", group,
                                     axis == 0 ? "columns" : "rows", along));
  if (group % 2 != 0) module.refuse_at(said, formatted("groups of {} for an even number", group));
  Storage made{.codes = Codes::uint4, .scaling = {.kind = Scaling::Kind::row}};
  made.scaling.type = type, made.scaling.zero = Zero::rounded;
  if (axis == 0)
    made.scaling.kind = Scaling::Kind::column;
  else if (group != shape[1])
    made.scaling.kind = Scaling::Kind::block;
  if (made.scaling.kind != Scaling::Kind::row)
    made.scaling.block = static_cast<std::int32_t>(group);
  try {
    (void)layout(made, shape);
  } catch (const Error& error) {
    module.refuse_at(said, in_quotes(error.what()));
  }
  return made;
}

void read_module(Claims& claims, const TensorInfo& codes) {
  const Module module{claims, codes, codes.name.substr(0, codes.name.size() - kCodes.size())};
  check_settings(module);
  const TensorInfo& scale = module.found("scale");
  const Shape shape = shape_of(module);
  const Storage storage = storage_of(module, shape, type_of(module, scale));
  check_compute(module, scale);
  const Grouping grouping(storage, shape);
  const auto expect = [&](std::string_view of, Dtype dtype, const Shape& wanted) {
    claims.part(Refusal::dialect_part, codes, {module.tensor(of), dtype, wanted, {}});
  };
  if (grouping.rows() % 2 != 0)
    module.refuse_at(codes, formatted("{} groups of {}, which are not two halves", grouping.groups,
                                      grouping.group));
  expect("W_q", Dtype::u8, grouping.codes());
  expect("scale", scale.dtype, grouping.numbers());
  expect("zero", scale.dtype, grouping.numbers());
  WeightInfo& made = claims.add(module.tensor("weight"), storage, shape,
                                {codes.name, scale.name, module.tensor("zero")}, scale.dtype);
  made.forms = {kHalves, {}, {}};
  for (const Setting& setting : kSettings)
    if (claims.find(module.tensor(setting.name)) != nullptr)
      claims.add_beside(made, module.tensor(setting.name));
  for (const char* of : {"shape", "axis", "group_size", "compute_dtype"})
    if (claims.find(module.tensor(of)) != nullptr) claims.add_beside(made, module.tensor(of));
  check_not_listed(claims, made, "skip_modules");
}

void read(Claims& claims) {
  for (const TensorInfo& codes : claims.tensors())
    if (codes.name.ends_with(kCodes)) read_module(claims, codes);
}

bool write(Wording& wording, const WeightInfo& weight) {
  const Scaling& scaling = weight.storage.scaling;
  const bool grouped = scaling.kind == Scaling::Kind::row || scaling.kind == Scaling::Kind::block ||
                       scaling.kind == Scaling::Kind::column;
  if (scaling.zero != Zero::rounded || !grouped || weight.shape.rank() != 2) return false;
  if (weight.shape.elements() == 0) return false;
  const Grouping grouping(weight.storage, weight.shape);
  if (weight.shape[grouping.axis] % grouping.group != 0 || grouping.group % 8 != 0) return false;
  if (grouping.rows() % 2 != 0 || !weight.name.ends_with(".weight")) return false;
  const std::string module(module_of(weight.name));
  const auto name = [&](std::string_view of) { return formatted("{}.{}", module, of); };
  const Dtype type = describe(weight.storage).scale.type;
  wording.add_part(name("W_q"), Dtype::u8, grouping.codes(), 0, kHalves);
  wording.add_part(name("scale"), type, grouping.numbers(), 1);
  wording.add_part(name("zero"), type, grouping.numbers(), 2);
  const auto add_number = [&](std::string_view of, std::int64_t number) {
    wording.add_text(name(of), Dtype::i32, {},
                     bytes_of_numbers(std::vector{static_cast<std::int32_t>(number)}));
  };
  const auto add_text = [&](std::string_view of, const std::string& text) {
    wording.add_text(name(of), Dtype::u8, {static_cast<std::int64_t>(text.size())}, text);
  };
  wording.add_text(name("shape"), Dtype::i64, {2},
                   bytes_of_numbers(std::vector{weight.shape[0], weight.shape[1]}));
  add_number("axis", grouping.axis);
  add_number("group_size", grouping.group);
  add_text("compute_dtype", formatted("torch.{}", torch_name(type)));
  for (const Setting& setting : kSettings) {
    const std::string written(setting.written);
    if (setting.dtype == Dtype::i32)
      add_number(setting.name, std::stoi(written));
    else if (written.size() > 1)
      add_text(setting.name, written);
    else
      wording.add_text(name(setting.name), Dtype::u8, {},
                       std::string(1, static_cast<char>(written[0] - '0')));
  }
  return true;
}

// Modules say the rest of themselves.
void finish(Wording& wording) {
  wording.check_same("group", [](const Storage& storage) { return to_string(storage); });
  const WeightInfo& first = wording.weights().front();
  const Grouping grouping(first.storage, first.shape);
  wording.set_config({{"quant_config",
                       {{"weight_quant_params",
                         {{"nbits", 4},
                          {"channel_wise", true},
                          {"group_size", grouping.group},
                          {"optimize", true},
                          {"round_zero", true},
                          {"axis", grouping.axis},
                          {"view_as_float", false}}},
                        {"scale_quant_params", nullptr},
                        {"zero_quant_params", nullptr},
                        {"offload_meta", false}}},
                      {"quant_method", "hqq"},
                      {"skip_modules", wording.plain_modules()}});
}

std::string recognise(const TensorSource&) { return ""; }  // W_q may be any tool's

}  // namespace
}  // namespace hqq

const FileDialect kHqq{"hqq", "hqq", hqq::recognise, hqq::read, hqq::write, hqq::finish};

}  // namespace stowage::dialects
