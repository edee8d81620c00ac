// SPDX-License-Identifier: Apache-2.0
// A resting weight: a storage, a logical shape and pointers to its parts.
#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "stowage/storage.h"

namespace stowage {
inline namespace v0 {

/// Cheap to copy. The parts are borrowed unless `owner` keeps their memory alive (a buffer, a file
/// mapping). Parts are read-only here and need no alignment beyond their element's.
class STOWAGE_API Weight {
 public:
  Weight() = default;
  /// `parts` in the order of layout(storage, shape). Throws invalid_argument when their number is
  /// wrong or one is null although it has bytes.
  Weight(const Storage& storage, const Shape& shape, std::span<const void* const> parts,
         std::shared_ptr<const void> owner = nullptr);

  const Storage& storage() const noexcept { return storage_; }
  const Shape& shape() const noexcept { return shape_; }
  std::int64_t rows() const noexcept { return shape_.rows(); }
  std::int64_t row_elements() const noexcept { return shape_.row_elements(); }
  const void* part(int i) const noexcept { return parts_[static_cast<std::size_t>(i)]; }
  /// Matrix `index` of a stack [E, O, K]: a weight [O, K] on the same memory, whose rows have the
  /// scales that pairs of indices had (row2), and which has one scale where they were by rows.
  /// Nothing where blocks or bytes of codes run across matrices, or matrices lie transposed
  /// (lying() is the stack of what lies there). Throws out_of_range for an index that none has.
  std::optional<Weight> matrix(std::int64_t index) const;
  /// Bytes at rest, all parts.
  std::int64_t bytes() const { return layout(storage_, shape_).bytes(); }

 private:
  Storage storage_{};
  Shape shape_{};
  std::array<const void*, kMaxParts> parts_{};
  std::shared_ptr<const void> owner_;
};

}  // namespace v0
}  // namespace stowage
