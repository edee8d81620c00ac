// SPDX-License-Identifier: Apache-2.0
// Element types and shapes. Everything here is a value.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

/// Every element type of safetensors 0.8, plus `unknown` for names that a later version may add.
enum class Dtype : std::uint8_t {
  boolean,
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f4,
  f16,
  bf16,
  f32,
  f64,
  c64,
  unknown
};
/// Bits of one element; 0 for `unknown`.
STOWAGE_API int bits(Dtype dtype) noexcept;
/// The name in a safetensors header ("BF16", "F8_E4M3", ...); "" for `unknown`.
STOWAGE_API std::string_view disk_name(Dtype dtype) noexcept;
STOWAGE_API Dtype dtype_from_disk_name(std::string_view name) noexcept;
/// "bfloat16", as torch calls a value dtype; empty for others.
STOWAGE_API std::string_view torch_name(Dtype dtype) noexcept;
/// f64, f32, bf16, f16: what values are given in and computed with.
constexpr bool is_value_dtype(Dtype d) {
  return d == Dtype::f64 || d == Dtype::f32 || d == Dtype::bf16 || d == Dtype::f16;
}

/// Up to eight dimensions, row-major. Sizes are never negative and their product fits int64.
class STOWAGE_API Shape {
 public:
  static constexpr int kMaxRank = 8;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes);
  explicit Shape(std::span<const std::int64_t> sizes);  // throws invalid_argument

  int rank() const noexcept { return rank_; }
  std::int64_t operator[](int i) const noexcept { return sizes_[static_cast<std::size_t>(i)]; }
  std::span<const std::int64_t> sizes() const noexcept {
    return {sizes_.data(), static_cast<std::size_t>(rank_)};
  }
  std::int64_t elements() const noexcept { return elements_; }
  /// Index range of dim 0 (1 for a scalar), and the elements below one such index.
  std::int64_t rows() const noexcept { return rank_ == 0 ? 1 : sizes_[0]; }
  std::int64_t row_elements() const noexcept;
  bool operator==(const Shape&) const = default;

 private:
  std::array<std::int64_t, kMaxRank> sizes_{};
  std::int64_t elements_ = 1;
  int rank_ = 0;
};
STOWAGE_API std::string to_string(const Shape& shape);  // "[4096, 11008]"

}  // namespace v0
}  // namespace stowage
