// SPDX-License-Identifier: Apache-2.0
// A weight is its descriptor and pointers; the constructor checks that they belong together.
#include "stowage/weight.h"

#include <algorithm>
#include <string>
#include <utility>

#include "format/legal.h"
#include "stowage/descriptor.h"

namespace stowage {
inline namespace v0 {
namespace {

std::string names(const Layout& made) {
  std::string text;
  for (int i = 0; i < made.count; ++i)
    text.append(i == 0 ? "" : ", ").append(made.parts[static_cast<std::size_t>(i)].name);
  return text;
}

// How a matrix of a stack rests; nothing where none rests by itself.
std::optional<Storage> of_matrix(const Storage& stack, const Shape& shape) {
  using Kind = Scaling::Kind;
  if (stack.scaling.transposed || stack.scaling.actorder || stack.dialect == Dialect::torchao)
    return std::nullopt;
  const auto one_less = [](Kind kind) {
    return kind == Kind::row2 ? Kind::row : kind == Kind::row ? Kind::tensor : kind;
  };
  Storage made = stack;
  made.scaling.kind = one_less(stack.scaling.kind);
  made.scaling.outer = stack.scaling.outer == Kind::row2 ? Kind::row : Kind::none;
  const Descriptor form = describe(stack);
  const std::int64_t columns = shape[2], whole = shape[1] * columns;
  std::int64_t together = codes_together(form.packing), of = columns;
  if (form.scale.group.kind == Group::Kind::along)
    together = std::max<std::int64_t>(together, form.scale.group.n);
  if (form.scale.group.kind == Group::Kind::flat) {
    const bool nested = form.outer.group.kind == Group::Kind::flat;
    together = std::int64_t{form.scale.group.n} * (nested ? form.outer.group.n : 1);
    of = whole;
  }
  return of % together == 0 && is_legal(made) ? std::optional(made) : std::nullopt;
}

}  // namespace

std::optional<Weight> Weight::matrix(std::int64_t index) const {
  if (shape_.rank() != 3) return std::nullopt;
  if (index < 0 || index >= shape_[0])
    throw Error(Code::out_of_range, "weight: a matrix of " + to_string(shape_) + " must be 0 to " +
                                        std::to_string(shape_[0] - 1) + ", got " +
                                        std::to_string(index));
  const std::optional<Storage> storage = of_matrix(storage_, shape_);
  if (!storage) return std::nullopt;
  const Shape shape{shape_[1], shape_[2]};
  const Layout all = layout(storage_, shape_), one = layout(*storage, shape);
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(one.count); ++i) {
    const std::int64_t bytes = one.parts[i].bytes;
    const bool shared = all.parts[i].bytes == bytes;
    if (!shared && all.parts[i].bytes != bytes * shape_[0]) return std::nullopt;
    parts[i] = static_cast<const std::byte*>(parts_[i]) + (shared ? 0 : index * bytes);
  }
  return Weight(*storage, shape, std::span(parts).first(static_cast<std::size_t>(one.count)),
                owner_);
}

Weight::Weight(const Storage& storage, const Shape& shape, std::span<const void* const> parts,
               std::shared_ptr<const void> owner)
    : storage_(storage), shape_(shape), owner_(std::move(owner)) {
  const Layout made = layout(storage, shape);
  if (parts.size() != static_cast<std::size_t>(made.count))
    throw Error(Code::invalid_argument, "weight: " + to_string(storage) + " must have " +
                                            std::to_string(made.count) + " parts (" + names(made) +
                                            "), got " + std::to_string(parts.size()));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == nullptr && made.parts[i].bytes != 0)
      throw Error(Code::invalid_argument, "weight: part " + std::string(made.parts[i].name) +
                                              " of " + to_string(storage) + " must hold " +
                                              std::to_string(made.parts[i].bytes) +
                                              " bytes, got a null pointer");
    parts_[i] = parts[i];
  }
}

}  // namespace v0
}  // namespace stowage
