// SPDX-License-Identifier: Apache-2.0
// The element types of safetensors: their widths and how a header and torch spell them.
#include <array>

#include "stowage/storage.h"

namespace stowage {
inline namespace v0 {
namespace {

struct Row {
  Dtype dtype;
  int bits;
  std::string_view disk;
  std::string_view torch = {};  // of value dtypes
};
// Source: safetensors 0.8, src/tensor.rs, enum Dtype.
constexpr std::array<Row, 19> kRows{{{Dtype::boolean, 8, "BOOL"},
                                     {Dtype::u8, 8, "U8"},
                                     {Dtype::i8, 8, "I8"},
                                     {Dtype::u16, 16, "U16"},
                                     {Dtype::i16, 16, "I16"},
                                     {Dtype::u32, 32, "U32"},
                                     {Dtype::i32, 32, "I32"},
                                     {Dtype::u64, 64, "U64"},
                                     {Dtype::i64, 64, "I64"},
                                     {Dtype::f8_e4m3, 8, "F8_E4M3"},
                                     {Dtype::f8_e5m2, 8, "F8_E5M2"},
                                     {Dtype::f8_e8m0, 8, "F8_E8M0"},
                                     {Dtype::f4, 4, "F4"},
                                     {Dtype::f16, 16, "F16", "float16"},
                                     {Dtype::bf16, 16, "BF16", "bfloat16"},
                                     {Dtype::f32, 32, "F32", "float32"},
                                     {Dtype::f64, 64, "F64", "float64"},
                                     {Dtype::c64, 64, "C64"},
                                     {Dtype::unknown, 0, ""}}};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kRows.size(); ++i)
    if (kRows[i].dtype != static_cast<Dtype>(i)) return false;
  return true;
}
static_assert(in_order(), "a row sits at the index of its dtype");

const Row& row(Dtype dtype) noexcept {
  const auto i = static_cast<std::size_t>(dtype);
  return i < kRows.size() ? kRows[i] : kRows.back();
}

}  // namespace

int bits(Dtype dtype) noexcept { return row(dtype).bits; }

std::string_view disk_name(Dtype dtype) noexcept { return row(dtype).disk; }

std::string_view torch_name(Dtype dtype) noexcept { return row(dtype).torch; }

Dtype dtype_from_disk_name(std::string_view name) noexcept {
  for (const Row& r : kRows)
    if (r.disk == name) return r.dtype;
  return Dtype::unknown;
}

}  // namespace v0
}  // namespace stowage
