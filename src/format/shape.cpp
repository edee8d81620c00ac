// SPDX-License-Identifier: Apache-2.0
// Shapes: checked at birth, so that nothing that is computed from one can overflow.
#include <algorithm>
#include <string>

#include "base/checked.h"
#include "stowage/storage.h"

namespace stowage {
inline namespace v0 {
namespace {

std::string list(std::span<const std::int64_t> sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

[[noreturn]] void refuse(const char* rule, std::span<const std::int64_t> sizes) {
  throw Error(Code::invalid_argument, std::string("shape: ") + rule + ", got " + list(sizes));
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> sizes)
    : Shape(std::span<const std::int64_t>(sizes.begin(), sizes.size())) {}

Shape::Shape(std::span<const std::int64_t> sizes) {
  if (sizes.size() > kMaxRank) refuse("must have at most 8 dimensions", sizes);
  // Zeros are left out of the product that is checked: the elements below one row of an empty
  // weight must be countable too.
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) refuse("sizes must not be negative", sizes);
    empty = empty || size == 0;
    const auto next = checked_mul(product, std::max<std::int64_t>(size, 1));
    if (!next) refuse("the number of elements must fit 64 bits", sizes);
    product = *next;
  }
  std::ranges::copy(sizes, sizes_.begin());
  rank_ = static_cast<int>(sizes.size());
  elements_ = empty ? 0 : product;
}

std::int64_t Shape::row_elements() const noexcept {
  std::int64_t product = 1;
  for (int i = 1; i < rank_; ++i) product *= (*this)[i];
  return product;
}

std::string to_string(const Shape& shape) { return list(shape.sizes()); }

}  // namespace v0
}  // namespace stowage
