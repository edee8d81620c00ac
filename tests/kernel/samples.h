// SPDX-License-Identifier: Apache-2.0
// Values and weights for the kernel tests: inputs of every kind and type, and the answers of the
// reference codec.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "format/convert.h"
#include "format/reference.h"
#include "kernel/kernels.h"
#include "storages.h"
#include "stowage/descriptor.h"

namespace stowage::samples {

using Bytes = std::vector<std::byte>;

inline constexpr std::array<Dtype, 4> kValueTypes{Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16};

/// What `make` gives for `key`: made once by each place that asks, and kept as long as the program.
template <class Make>
const auto& kept(const std::string& key, const Make& make) {
  static std::map<std::string, decltype(make())> all;
  const auto found = all.find(key);
  return (found != all.end() ? found : all.emplace(key, make()).first)->second;
}
/// Stands for bytes in such a key.
inline std::string key_of(const void* bytes, std::size_t count) {
  const std::string_view view(static_cast<const char*>(bytes), count);
  return std::to_string(count) + ":" + std::to_string(std::hash<std::string_view>{}(view));
}
inline std::string key_of(const Weight& weight) {
  const Layout layout = stowage::layout(weight.storage(), weight.shape());
  std::string key = to_string(weight.storage()) + to_string(weight.shape());
  for (int i = 0; i < layout.count; ++i)
    key += key_of(weight.part(i),
                  static_cast<std::size_t>(layout.parts[static_cast<std::size_t>(i)].bytes));
  return key;
}

inline std::size_t width(Dtype dtype) { return static_cast<std::size_t>(bits(dtype)) / 8; }

/// Numbers as an array of `dtype`, rounded as that type does.
inline Bytes as_type(const std::vector<double>& numbers, Dtype dtype) {
  Bytes bytes(numbers.size() * width(dtype));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double x = numbers[i];
    const auto single = static_cast<float>(x);
    const std::uint16_t half = dtype == Dtype::bf16 ? f32_to_bf16(single) : f32_to_f16(single);
    const void* from = dtype == Dtype::f64   ? static_cast<const void*>(&x)
                       : dtype == Dtype::f32 ? static_cast<const void*>(&single)
                                             : &half;
    std::memcpy(bytes.data() + i * width(dtype), from, width(dtype));
  }
  return bytes;
}

enum class Kind { normal, wide, tiny, edges };
inline constexpr std::array<Kind, 4> kKinds{Kind::normal, Kind::wide, Kind::tiny, Kind::edges};

/// Finite numbers. `wide`: exponents from -40 to 12 and signed zeros; `tiny`: subnormal in fp32;
/// `edges`: values and midpoints of the small formats and their neighbours in fp64.
inline std::vector<double> made_numbers(Kind kind, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponent(-40, 12), code(0, 255), nudge(-1, 1);
  std::vector<double> made(n);
  for (double& x : made) {
    x = normal(random);
    if (kind == Kind::wide)
      x = code(random) < 16 ? std::copysign(0.0, x) : std::ldexp(x, exponent(random));
    if (kind == Kind::tiny) x = std::ldexp(x, -133);
    if (kind != Kind::edges) continue;
    const auto values = trait(code(random) % 2 == 0 ? Codes::f8_e4m3 : Codes::f8_e5m2).values;
    const auto i = static_cast<std::size_t>(code(random)) & 0x7Bu;
    const double value = values[i], next = values[i + 1];
    x = std::copysign(code(random) % 2 == 0 ? value : (value + next) / 2, x);
    if (!std::isfinite(x)) x = 1;
    x += nudge(random) * std::ldexp(std::fabs(x), -45);
  }
  return made;
}
inline const std::vector<double>& numbers(Kind kind, std::size_t n, unsigned seed = 1) {
  const std::string key =
      std::to_string(static_cast<int>(kind)) + ":" + std::to_string(n) + ":" + std::to_string(seed);
  return kept(key, [&] { return made_numbers(kind, n, seed); });
}

/// Those numbers as an array of `dtype`.
inline const Bytes& numbers_as(Dtype dtype, Kind kind, const Shape& shape) {
  const auto n = static_cast<std::size_t>(shape.elements());
  const std::string key = std::string(disk_name(dtype)) + std::to_string(static_cast<int>(kind)) +
                          ":" + std::to_string(n);
  return kept(key, [&] { return as_type(numbers(kind, n), dtype); });
}

/// The parts of a weight in memory of their own.
struct Parts {
  Layout layout;
  std::vector<Bytes> bytes;

  Parts(const Storage& storage, const Shape& shape) : layout(stowage::layout(storage, shape)) {
    for (int i = 0; i < layout.count; ++i)
      bytes.emplace_back(
          static_cast<std::size_t>(layout.parts[static_cast<std::size_t>(i)].bytes) + 1,
          std::byte{0xA5});  // one more: a part without bytes has an address too
  }
  std::vector<void*> writable() {
    std::vector<void*> pointers;
    for (Bytes& part : bytes) pointers.push_back(part.data());
    return pointers;
  }
  Weight weight(const Storage& storage, const Shape& shape) const {
    std::vector<const void*> pointers;
    for (const Bytes& part : bytes) pointers.push_back(part.data());
    return {storage, shape, pointers};
  }
};

inline const Parts& reference_parts(const Bytes& values, Dtype dtype, const Shape& shape,
                                    const Storage& storage, bool keep_nonfinite = false) {
  const std::string key = to_string(storage) + to_string(shape) + std::string(disk_name(dtype)) +
                          (keep_nonfinite ? "+" : "-") + key_of(values.data(), values.size());
  return kept(key, [&] {
    Parts parts(storage, shape);
    reference::quantize(values.data(), dtype, shape, storage, parts.writable(), keep_nonfinite);
    return parts;
  });
}

inline const Bytes& reference_values(const Weight& weight, Dtype dtype) {
  return kept(key_of(weight) + std::string(disk_name(dtype)), [&] {
    Bytes values(static_cast<std::size_t>(weight.shape().elements()) * width(dtype));
    reference::dequantize(weight, values.data(), dtype);
    return values;
  });
}

/// Storages of every kind and size of group, that every shape can have.
inline const std::vector<std::string>& storages() {
  static const auto all = covering(codec_features, has_every_shape);
  return all;
}
/// Those, and the ones that not every shape can have.
inline const std::vector<std::string>& every_storage() {
  static const auto all = covering(codec_features, is_any);
  return all;
}
/// A few, one for each way in which codes and scales lie.
inline const std::vector<std::string>& every_form() {
  static const auto all = covering(form_features, is_any);
  return all;
}
inline std::vector<Shape> few_large(std::vector<Shape> all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::erase_if(all, [](const Shape& shape) {
    return shape.elements() > 10'000 && shape != Shape{40, 600};
  });
#endif
  return all;
}
/// Shapes with whole and ragged rows and blocks, odd and even, and without elements. Under a
/// sanitizer, where a test of all takes most of a minute, one alone is so large that several tasks
/// share it.
inline const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = few_large(
      {{1, 1},     {3, 5},     {4, 64},      {7, 67},    {33, 129},    {2, 3, 50},  {150, 211},
       {5, 0},     {0, 5},     {3, 2, 3, 3}, {1, 4097},  {64},         {6, 48},     {3, 192},
       {128, 129}, {33, 130},  {3, 2, 70},   {2, 96, 5}, {3, 64, 290}, {3, 33, 70}, {5, 8},
       {3, 4104},  {2, 3, 88}, {2, 33000},   {40, 600},  {24, 130}});
  return all;
}
/// Whether a weight of this storage can have this shape.
inline bool holds(const Storage& storage, const Shape& shape) {
  if (storage.scaling.transposed) return shape.rank() == 3 && shape[1] % storage.scaling.block == 0;
  if (storage.scaling.kind == Scaling::Kind::row2 && shape.rank() < 2) return false;
  if (storage.scaling.outer == Scaling::Kind::row2) {
    std::int64_t each = 1;
    for (int i = 2; i < shape.rank(); ++i) each *= shape[i];
    return shape.rank() >= 3 && each % storage.scaling.block == 0;
  }
  if (storage.scaling.kind == Scaling::Kind::block2) {
    if (shape.rank() != 2 && shape.rank() != 3) return false;
    return shape[shape.rank() - 1] % codes_together(describe(storage).packing) == 0;
  }
  if (storage.scaling.kind == Scaling::Kind::column &&
      (shape.rank() != 2 || shape[0] % storage.scaling.block != 0))
    return false;
  if (const int together = codes_together(describe(storage).packing);
      together != 1 && !runs_across_rows(storage)) {
    const bool row2 = storage.scaling.kind == Scaling::Kind::row2;
    if (shape.rank() < (row2 ? 3 : 2)) return false;
    return (row2 ? group_elements(storage, shape) : shape.row_elements()) % together == 0;
  }
  const std::int64_t whole = storage.scaling.block * std::int64_t{storage.scaling.scaler_block};
  return storage.dialect == Dialect::standard ||
         (shape.rank() <= 2 && shape.elements() % whole == 0);
}

/// A test of every table of kernels that this CPU runs, one after the other in one process: the
/// body is that of a function with the argument `const Kernels& table`, and what the tables are
/// compared with is made for the first of them and kept. EveryLevel (isa_test.cpp) names the tables
/// that this CPU lacks.
inline void on_each_isa(void (*body)(const Kernels&)) {
  for (const NamedKernels& level : runnable_kernels()) {
    SCOPED_TRACE(level.name);
    body(*level.kernels);
  }
}
/// The table of that name, which this CPU runs, or null.
inline const Kernels* variant(std::string_view name) {
  for (const NamedKernels& table : runnable_kernels())
    if (table.name == name) return table.kernels;
  return nullptr;
}

#define STOWAGE_ON_EACH_ISA(suite, name)                            \
  void suite##name(const Kernels& table);                           \
  TEST(suite, name) { stowage::samples::on_each_isa(suite##name); } \
  void suite##name(const Kernels& table)

}  // namespace stowage::samples
