// SPDX-License-Identifier: Apache-2.0
// Ops that describe: storage strings and keys, this build.
#include <nlohmann/json.hpp>
#include <vector>

#include "format/torchao.h"
#include "stowage/descriptor.h"
#include "stowage/info.h"
#include "stowage/storage.h"
#include "torch/arguments.h"

namespace stowage::door {
namespace {
using nlohmann::json;

constexpr const char* kTypes[] = {"f32",           "bf16",  "f16",   "f64",
                                  "of_values",     "e8m0",  "e4m3",  "e4m3_bf16",
                                  "e4m3_quotient", "super", "absmax"};
constexpr const char* kKinds[] = {"none", "tensor", "row", "row2", "block", "block2", "column"};

constexpr const char* kCodecs[] = {"cast", "amax", "bitsandbytes", "torchao", "ggml"};
constexpr const char* kScaleCodes[] = {"plain",  "mapped",  "affine",       "q4_k",    "q6_k",
                                       "absmax", "product", "product_bf16", "quotient"};
constexpr const char* kZeros[] = {"", "code", "offset", "sum", "rounded"};
constexpr const char* kPackings[] = {"whole", "high_first", "low_first", "dense"};
constexpr const char* kExtents[] = {"weight", "pairs",  "packed", "scales", "outers",
                                    "one",    "values", "map",    "columns"};

// Of a part in memory: "codes" as the format has them, "own" as the storage says.
const char* dtype_name(const PartRow& part, const Level& level) {
  if (part.extent == Extent::weight) return "codes";
  switch (part.dtype == Dtype::unknown ? level.type : part.dtype) {
    case Dtype::u8:
    case Dtype::f8_e8m0:
    case Dtype::f8_e4m3:
      return "u8";
    case Dtype::i8:
      return "i8";
    case Dtype::i32:
      return "i32";
    case Dtype::f32:
      return "f32";
    default:
      return "own";
  }
}

// What codes of sixteen values stand for, by code, rounded to the dtype of the parts.
std::vector<double> values_of(const Storage& storage) {
  const auto standard = trait(storage.codes).values;
  std::vector<double> values(standard.begin(), standard.end());
  if (storage.dialect == Dialect::torchao)
    torchao::with_type(storage.scaling.type, [&]<class D>(D) {
      for (std::size_t k = 0; k < values.size(); ++k)
        values[k] = static_cast<double>(torchao::value<D>(k));
    });
  return values;
}

// What e4m3 scales stand under numbers of.
const char* outer_kind(const Scaling& scaling) {
  const auto kind = scaling.outer == Scaling::Kind::none ? Scaling::Kind::tensor : scaling.outer;
  return kKinds[static_cast<int>(kind)];
}

// Whether matrices of such a stack [E, O, K] rest by themselves.
bool has_matrices_op(std::int64_t key, const std::vector<std::int64_t>& sizes) {
  const Storage storage = storage_from_key(key);
  const Shape shape(sizes);
  if (shape.rank() != 3 || shape[0] == 0) return false;
  std::array<const void*, kMaxParts> parts;
  parts.fill(&key);  // nobody reads them
  const auto count = static_cast<std::size_t>(layout(storage, shape).count);
  return Weight(storage, shape, std::span(parts).first(count)).matrix(0).has_value();
}

std::int64_t storage_key_op(const std::string& text) { return storage_key(parse_storage(text)); }

// A string, whose memory torch keeps: once for each storage, since Python remembers them. A tensor
// would be a fake one inside of graphs.
std::string storage_describe(std::int64_t key) {
  const Storage storage = storage_from_key(key);
  const FormatTrait& format = trait(storage.codes);
  const Descriptor form = describe(storage);
  const CodeRange range = code_range(storage);
  json parts = json::array();
  for (const PartRow& part : form.parts)
    parts.push_back(
        {part.name, kExtents[static_cast<int>(part.extent)], dtype_name(part, form.scale)});
  json out = {{"name", to_string(storage)},
              {"codes", format.name},
              {"codec", kCodecs[static_cast<int>(form.codec)]},
              {"dialect", storage.dialect == Dialect::torchao ? "torchao" : "standard"},
              {"kind", kKinds[static_cast<int>(storage.scaling.kind)]},
              {"packing", kPackings[static_cast<int>(form.packing)]},
              {"bits", format.bits},
              {"powers", form.powers == PowerRule::floor ? "floor" : "ceil"},
              {"flat", form.scale.group.kind == Group::Kind::flat},
              {"block", storage.scaling.block},
              {"rows", storage.scaling.rows},
              {"nested", storage.scaling.nested},
              {"zero", kZeros[static_cast<int>(storage.scaling.zero)]},
              {"actorder", storage.scaling.actorder},
              {"transposed", storage.scaling.transposed},
              {"record", form.scale.record},
              {"outer", form.outer.group.n},
              {"outer_kind", stands_under_one(form) ? outer_kind(storage.scaling) : ""},
              {"scale_code", kScaleCodes[static_cast<int>(form.scale.code)]},
              {"under_one", stands_under_one(form)},
              {"factor", form.factor},
              {"scaler_block", storage.scaling.scaler_block},
              {"scale_type", kTypes[static_cast<int>(storage.scaling.type)]},
              {"parts", std::move(parts)},
              {"in_rows", parts_in_rows(storage)},
              {"least", range.least},
              {"largest", range.most},
              {"divisor", range.divisor}};
  if (format.values.size() == 16) out["values"] = values_of(storage);
  return out.dump();
}

Tensor info() {
  json out = {{"version", version()}, {"commit", commit()}};
  try {
    out["instruction_set"] = instruction_set();
  } catch (const Error&) {  // the kernels are refused: STOWAGE_FORCE_ISA names none of them
    out["instruction_set"] = nullptr;
  }
  return text_bytes(out.dump());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("storage_key", TORCH_BOX(&Door<&storage_key_op>::call));
  m.impl("info", TORCH_BOX(&Door<&info>::call));
  m.impl("storage_describe", TORCH_BOX(&Door<&storage_describe>::call));
  m.impl("storage_has_matrices", TORCH_BOX(&Door<&has_matrices_op>::call));
}
}  // namespace stowage::door
