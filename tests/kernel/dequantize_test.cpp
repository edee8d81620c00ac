// SPDX-License-Identifier: Apache-2.0
// Dequantize kernels and driver against the reference codec, byte for byte.
#include "base/threads.h"
#include "expect_error.h"
#include "fenced.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::dequantize_test {
namespace {

using namespace stowage::samples;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const float kScales[] = {1.0f,        0.37f,    -1.5f,     0.0f,     -0.0f,           0x1p-126f,
                         0x1.8p-140f, 0x1p100f, 0x1p-100f, 0x1p-24f, 0x1.fffffep127f, kInf,
                         -kInf,       kNan};

Bytes run_kernel(const Kernels& table, Codes codes, const Run& run, Dtype out) {
  Bytes values(static_cast<std::size_t>(run.n) * width(out));
  table.dequantize.to[static_cast<int>(codes)][value_index(out)](run, values.data());
  return values;
}

// Every code of at most 16 bits, in order; for 4 bits every byte.
Bytes every_code(Codes codes) {
  const int bits = trait(codes).bits;
  Bytes all(bits == 16 ? 2 * 65536 : 256);
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = static_cast<std::byte>(bits != 16 ? i : i % 2 == 0 ? i / 2 : i / 2 >> 8);
  return all;
}
std::int64_t count_of(Codes codes, const Bytes& bytes) {
  return static_cast<std::int64_t>(bytes.size()) * 8 / trait(codes).bits;
}

STOWAGE_ON_EACH_ISA(Dequantize, EveryCodeUnderEveryScaleToEveryType) {
  const auto with_values = [](const Storage& storage) {
    return storage.scaling == Scaling{.kind = Scaling::Kind::block, .block = 64};
  };
  for (const std::string& name : covering(codec_features, with_values)) {
    const Storage storage = parse_storage(name);
    const Codes codes = storage.codes;
    if (describe(storage).packing == Packing::dense) continue;  // int8's, of what is unpacked
    const Bytes all = every_code(codes);
    const std::int64_t n = count_of(codes, all);
    for (const float scale : kScales) {
      const std::vector<float> scales(static_cast<std::size_t>(n), scale);
      const Weight weight(storage, {1, n}, std::vector<const void*>{all.data(), scales.data()});
      for (const Dtype out : kValueTypes)
        EXPECT_EQ(run_kernel(table, codes, {all.data(), 0, scales.data(), 64, n}, out),
                  reference_values(weight, out))
            << trait(codes).name << " x " << scale << " to " << disk_name(out);
    }
  }
}

STOWAGE_ON_EACH_ISA(Dequantize, EveryCodeInGroupsLargeEnoughForTables) {
  for (const Codes codes : {Codes::f8_e4m3, Codes::f8_e5m2, Codes::int8}) {
    Bytes all;
    for (int i = 0; i < 20; ++i) {
      const Bytes once = every_code(codes);
      all.insert(all.end(), once.begin(), once.end());
    }
    const std::int64_t n = count_of(codes, all);
    const Storage storage = parse_storage(std::string(trait(codes).name) + ":tensor");
    for (const float scale : kScales) {
      const Weight weight(storage, {n}, std::vector<const void*>{all.data(), &scale});
      for (const Dtype out : kValueTypes)
        EXPECT_EQ(run_kernel(table, codes, {all.data(), 0, &scale, n, n}, out),
                  reference_values(weight, out))
            << trait(codes).name << " x " << scale << " to " << disk_name(out);
    }
  }
}

STOWAGE_ON_EACH_ISA(Dequantize, EveryPlainCastOfAtMostSixteenBits) {
  for (const Codes codes : {Codes::bf16, Codes::f16, Codes::f8_e4m3, Codes::f8_e5m2}) {
    const Bytes all = every_code(codes);
    const std::int64_t n = count_of(codes, all);
    const Weight weight(parse_storage(trait(codes).name), {n},
                        std::vector<const void*>{all.data()});
    for (const Dtype out : kValueTypes)
      EXPECT_EQ(run_kernel(table, codes, {all.data(), 0, nullptr, 1, n}, out),
                reference_values(weight, out))
          << trait(codes).name << " to " << disk_name(out);
  }
}

STOWAGE_ON_EACH_ISA(Dequantize, SinglesRoundToNearestEvenAndOverflowToInfinity) {
  std::mt19937 random(3);
  std::vector<float> values(1 << 16);
  for (float& x : values) x = float_of(static_cast<std::uint32_t>(random()));
  for (std::size_t i = 0; i < values.size(); i += 2)  // ties of bf16 and of f16
    values[i] = float_of(bits_of(values[i]) << (i % 4 == 0 ? 15 : 12));
  const auto n = static_cast<std::int64_t>(values.size());
  const Weight weight({Codes::f32}, {n}, std::vector<const void*>{values.data()});
  for (const Dtype out : kValueTypes)
    EXPECT_EQ(run_kernel(table, Codes::f32, {values.data(), 0, nullptr, 1, n}, out),
              reference_values(weight, out))
        << disk_name(out);
}

// One in eight of special ones, the others powers of two, or near 1: a group is next to any other.
std::vector<float> mixed_scales(std::mt19937& random, std::int64_t n, bool powers) {
  std::vector<float> scales(static_cast<std::size_t>(n));
  for (float& scale : scales) {
    const auto drawn = static_cast<std::uint32_t>(random());
    const int exponent = static_cast<int>(drawn % 60) - 30;
    scale = drawn % 8 == 0 ? kScales[drawn / 8 % std::size(kScales)]
            : powers       ? std::ldexp(1.0f, exponent)
                           : std::ldexp(1.0f + static_cast<float>(drawn >> 9) * 0x1p-23f, exponent);
  }
  return scales;
}

STOWAGE_ON_EACH_ISA(Dequantize, ShortGroupsOfAnyScalesAreThoseInFp32Rounded) {
  constexpr std::int64_t kCount = 128 * 40;
  std::mt19937 random(11);
  for (const FormatTrait& format : formats()) {
    if (format.bits > 8 || table.dequantize.to[static_cast<int>(format.codes)][0] == nullptr)
      continue;
    Bytes all(kCount);
    for (std::byte& b : all) b = static_cast<std::byte>(random() % (random() % 4 == 0 ? 256 : 120));
    for (const std::int64_t group : {16, 32, 64, 96, 128})
      for (const bool powers : {false, true})
        for (const bool offsets : {false, format.codes == Codes::uint4}) {
          const std::vector<float> scales = mixed_scales(random, kCount / group + 1, powers);
          const std::vector<float> less = mixed_scales(random, kCount / group + 1, powers);
          for (const std::int64_t first : {std::int64_t{0}, group, std::int64_t{5}}) {
            Run run{all.data(), first, scales.data(), group, kCount - first};
            if (offsets) run.offsets = less.data();
            const Bytes in_fp32 = run_kernel(table, format.codes, run, Dtype::f32);
            const Weight made({Codes::f32}, {run.n}, std::vector<const void*>{in_fp32.data()});
            for (const Dtype out : {Dtype::bf16, Dtype::f16})
              ASSERT_EQ(run_kernel(table, format.codes, run, out), reference_values(made, out))
                  << format.name << " in groups of " << group << " from " << first
                  << (powers ? ", powers of two" : "") << (offsets ? ", offsets" : "");
          }
        }
  }
}

// Runs of every length from every start, against a fence on either side of both buffers.
void check_lengths(const Kernels& table, Codes codes, Dtype out, std::int64_t group) {
  constexpr std::int64_t kLongest = 3 * 64 + 1, kStarts = 3;
  std::mt19937 random(7);
  Bytes all(static_cast<std::size_t>((kLongest + kStarts + 1) * trait(codes).bits / 8));
  for (std::byte& b : all) b = static_cast<std::byte>(random());
  std::vector<float> scales;
  for (std::int64_t i = 0; i <= kLongest + kStarts; i += group)
    scales.push_back(std::ldexp(1.0f, static_cast<int>(random() % 8)) * 0.7f);
  const float* scale = trait(codes).bits > 8 ? nullptr : scales.data();
  const Bytes whole =
      run_kernel(table, codes, {all.data(), 0, scale, group, kLongest + kStarts}, out);
  const auto kernel = table.dequantize.to[static_cast<int>(codes)][value_index(out)];
  const Fenced inputs(all.size()), outputs(whole.size());
  for (std::int64_t n = 0; n <= kLongest; ++n) {
    for (std::int64_t first = 0; first <= kStarts; ++first) {
      const auto end = static_cast<std::size_t>(((first + n) * trait(codes).bits + 7) / 8);
      const std::size_t bytes = static_cast<std::size_t>(n) * width(out);
      for (const auto against : {Fenced::Against::end, Fenced::Against::begin}) {
        char* to = outputs.piece(bytes, against);
        kernel({inputs.piece(std::span<const std::byte>(all).first(end), against), first, scale,
                group, n},
               to);
        ASSERT_EQ(
            std::memcmp(to, whole.data() + static_cast<std::size_t>(first) * width(out), bytes), 0)
            << trait(codes).name << " to " << disk_name(out) << " n " << n << " first " << first;
      }
    }
  }
}

STOWAGE_ON_EACH_ISA(Dequantize, TouchesNothingOutsideItsRun) {
  for (const FormatTrait& format : formats()) {
    if (table.dequantize.to[static_cast<int>(format.codes)][0] == nullptr) continue;
    for (const Dtype out : kValueTypes)
      for (const std::int64_t group : {16, 32, 1 << 20})
        check_lengths(table, format.codes, out, group);
  }
}

// Ranges of rows, and ranges of columns in the rows from a third on, with a byte behind each
// result.
void check_rows(const Kernels& table, const Weight& weight, Dtype out, const Bytes& all) {
  const std::int64_t n = weight.rows();
  const auto row = static_cast<std::size_t>(weight.row_elements()) * width(out);
  for (const Range rows : {Range{0, n}, Range{n / 3, n}, Range{0, n / 2}, Range{n, n}}) {
    Bytes got(static_cast<std::size_t>(rows.end - rows.begin) * row + 1, std::byte{0x5A});
    dequantize_with(table, weight, rows, got.data(), out, inline_executor());
    const std::byte* expected = all.data() + static_cast<std::size_t>(rows.begin) * row;
    EXPECT_TRUE(std::memcmp(got.data(), expected, got.size() - 1) == 0 &&
                got.back() == std::byte{0x5A})
        << "rows " << rows.begin << " to " << rows.end;
  }
}
void check_columns(const Kernels& table, const Weight& weight, Dtype out, const Bytes& all,
                   Executor& pool) {
  const Range rows{weight.rows() / 3, weight.rows()};
  const std::int64_t row = weight.row_elements();
  const auto bytes = static_cast<std::int64_t>(width(out));
  for (const Range columns : {Range{0, row}, Range{row / 3, row}, Range{0, row / 2},
                              Range{row / 2, row - row / 4}, Range{row, row}}) {
    const auto some = static_cast<std::size_t>(bytes * (columns.end - columns.begin));
    Bytes got(static_cast<std::size_t>(rows.end - rows.begin) * some + 1, std::byte{0x5A});
    dequantize_with(table, weight, rows, columns, got.data(), out, pool);
    bool same = got.back() == std::byte{0x5A};
    for (std::int64_t i = rows.begin; i < rows.end; ++i)
      same &= std::memcmp(got.data() + static_cast<std::size_t>(i - rows.begin) * some,
                          all.data() + bytes * (i * row + columns.begin), some) == 0;
    EXPECT_TRUE(same) << "columns " << columns.begin << " to " << columns.end;
  }
}

STOWAGE_ON_EACH_ISA(Dequantize, EveryStorageAndShapeAndRange) {
  const auto pool = make_pool(2);
  for (const std::string& name : every_storage()) {
    const Storage storage = parse_storage(name);
    for (const Shape& shape : shapes()) {
      if (!holds(storage, shape)) continue;
      const Parts& parts =
          reference_parts(numbers_as(Dtype::f32, Kind::wide, shape), Dtype::f32, shape, storage);
      const Weight weight = parts.weight(storage, shape);
      for (const Dtype out : kValueTypes) {
        SCOPED_TRACE(name + to_string(shape) + " to " + std::string(disk_name(out)));
        const Bytes& all = reference_values(weight, out);
        check_rows(table, weight, out, all);
        check_columns(table, weight, out, all, *pool);
      }
    }
  }
}

STOWAGE_ON_EACH_ISA(Dequantize, GivesTheSameBytesForEveryNumberOfThreads) {
  const Shape shape{700, 1003};
  const Bytes values =
      as_type(numbers(Kind::normal, static_cast<std::size_t>(shape.elements())), Dtype::bf16);
  for (const char* name : {"f8_e4m3", "int8:row", "f8_e5m2:block100", "nf4:block64:nested"}) {
    const Storage storage = parse_storage(name);
    const Parts parts = reference_parts(values, Dtype::bf16, shape, storage);
    const Weight weight = parts.weight(storage, shape);
    const Bytes expected = reference_values(weight, Dtype::bf16);
    for (const int threads : {1, 2, 3, 5}) {
      Bytes got(expected.size());
      dequantize_with(table, weight, {0, shape.rows()}, got.data(), Dtype::bf16,
                      *make_pool(threads));
      EXPECT_TRUE(got == expected) << name << " on " << threads << " threads";
    }
  }
}

TEST(DequantizeErrors, NameTheRule) {
  const std::uint8_t codes[6] = {};
  const Weight weight(parse_storage("f8_e4m3"), {2, 3}, std::vector<const void*>{codes});
  float out[6];
  EXPECT_STOWAGE_ERROR(dequantize(weight, {0, 3}, out, Dtype::f32), invalid_argument,
                       "dequantize: rows must lie in [0, 2), got [0, 3)");
  EXPECT_STOWAGE_ERROR(dequantize(weight, {1, 0}, out, Dtype::f32), invalid_argument, "[1, 0)");
  EXPECT_STOWAGE_ERROR(dequantize(weight, {-1, 1}, out, Dtype::f32), invalid_argument, "[-1, 1)");
  EXPECT_STOWAGE_ERROR(dequantize(weight, {0, 2}, {1, 4}, out, Dtype::f32), invalid_argument,
                       "dequantize: columns must lie in [0, 3), got [1, 4)");
  EXPECT_STOWAGE_ERROR(dequantize(weight, {0, 2}, out, Dtype::u8), invalid_argument, "got U8");
  EXPECT_STOWAGE_ERROR(dequantize(weight, {0, 2}, nullptr, Dtype::f32), invalid_argument, "null");
}

}  // namespace
}  // namespace stowage::dequantize_test
