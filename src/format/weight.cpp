// SPDX-License-Identifier: Apache-2.0
// A weight is its descriptor and pointers; the constructor checks that they belong together.
#include "stowage/weight.h"

#include <string>
#include <utility>

namespace stowage {
inline namespace v0 {
namespace {

std::string names(const Layout& made) {
  std::string text;
  for (int i = 0; i < made.count; ++i)
    text.append(i == 0 ? "" : ", ").append(made.parts[static_cast<std::size_t>(i)].name);
  return text;
}

}  // namespace

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
