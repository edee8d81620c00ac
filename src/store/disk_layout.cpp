// SPDX-License-Identifier: Apache-2.0
// Which tensors of a file a weight is: names as bitsandbytes (4-bit) and compressed-tensors (8-bit
// with scales) spell them, so that their readers need not know us. Nobody else has a file form of
// nf4:torchao: its parts are named as the peer's attributes, and only the manifest says what they
// are.
#include <string>
#include <string_view>

#include "store/quant_state.h"
#include "stowage/descriptor.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

Declaration declare(std::string name, Dtype dtype, const Shape& shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = shape, .dtype_name = {}};
}

}  // namespace

inline namespace v0 {

std::vector<Declaration> disk_layout(std::string_view name, const Storage& storage,
                                     const Shape& shape) {
  const Layout parts = layout(storage, shape);
  const FormatTrait& format = trait(storage.codes);
  const std::string base(name);
  std::vector<Declaration> made;
  const Part* part = parts.parts.data();
  const Descriptor form = describe(storage);
  for (const PartRow& row : form.parts) {
    Dtype dtype = part->dtype;
    if (row.extent == Extent::weight) dtype = format.disk;
    if (row.extent == Extent::scales && row.dtype == Dtype::unknown) dtype = form.scale.type;
    if (row.suffix != kNoTensor)
      made.push_back(declare(base + std::string(row.suffix), dtype, part->shape));
    ++part;
  }
  if (!has_quant_state(storage)) return made;
  const auto state_bytes =
      static_cast<std::int64_t>(quant_state(storage, shape, Dtype::bf16).size());
  made.push_back(declare(base + std::string(kQuantStatePrefix) + std::string(format.name),
                         Dtype::u8, {state_bytes}));
  made.push_back(declare(base + ".quant_map", Dtype::f32, {16}));
  return made;
}

}  // namespace v0
}  // namespace stowage
