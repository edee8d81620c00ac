// SPDX-License-Identifier: Apache-2.0
// Quantize kernels and driver against the reference codec, byte for byte.
#include "base/threads.h"
#include "expect_error.h"
#include "fenced.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::quantize_test {
namespace {

using namespace stowage::samples;
constexpr Codes kCasts[] = {Codes::f32, Codes::bf16, Codes::f16, Codes::f8_e4m3, Codes::f8_e5m2};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Parts quantized(const Kernels& table, const Bytes& values, Dtype dtype, const Shape& shape,
                const Storage& storage,
                QuantizeOptions options = {.executor = &inline_executor()}) {
  Parts parts(storage, shape);
  quantize_with(table, values.data(), dtype, shape, storage, parts.writable(), options);
  return parts;
}

STOWAGE_ON_EACH_ISA(Quantize, EveryHalfToEveryCast) {
  Bytes halves(2 * 65536);
  for (std::size_t i = 0; i < 65536; ++i) {
    const auto half = static_cast<std::uint16_t>(i);
    std::memcpy(halves.data() + 2 * i, &half, 2);
  }
  for (const Codes codes : kCasts)
    for (const Dtype in : {Dtype::bf16, Dtype::f16})
      EXPECT_TRUE(
          quantized(table, halves, in, {65536}, {codes}, {true, &inline_executor()}).bytes ==
          reference_parts(halves, in, {65536}, {codes}, true).bytes)
          << disk_name(in) << " to " << trait(codes).name;
}

// bf16 under a scale has steps of its own. Numbers beyond amax are left out, as are NaNs.
STOWAGE_ON_EACH_ISA(Quantize, EveryBf16UnderEveryKindOfScale) {
  for (const float amax : {1.0f, 0.37109375f, 448.0f, 3e38f, 1e-38f, 0x1p-130f}) {
    Bytes values(2 * 65536);
    const auto most = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(amax) >> 16);
    for (std::size_t i = 0; i < 65536; ++i) {
      const auto half = static_cast<std::uint16_t>((i & 0x7FFF) <= most ? i : most);
      std::memcpy(values.data() + 2 * i, &half, 2);
    }
    std::vector<std::string> names = covering(codec_features, [](const Storage& storage) {
      return storage.scaling.kind == Scaling::Kind::tensor &&
             storage.scaling.type == ScaleType::f32;
    });
    for (const char* of :
         {"f4_e2m1:block256x256:e8m0", "nvfp4", "f4_e2m1:block16:e4m3_bf16",
          "f4_e2m1:block16:e4m3_quotient", "nvfp4:row", "f4_e2m1:block16:e4m3_quotient:row"})
      names.emplace_back(of);
    for (const std::string& name : names) {
      const Storage storage = parse_storage(name);
      if (storage.scaling.zero != Zero::none && amax > 1e38f)
        continue;  // more than fp32 lies between the ends
      EXPECT_TRUE(quantized(table, values, Dtype::bf16, {256, 256}, storage).bytes ==
                  reference_parts(values, Dtype::bf16, {256, 256}, storage).bytes)
          << name << " amax " << amax;
    }
  }
}

// Each value of a format, each midpoint, and numbers next to both, which fp32 cannot all tell
// apart.
std::vector<double> edges_of(Codes codes) {
  std::vector<double> all{0x1p-1074, 0x1p-150, 1e300,   1e-300, 1e39,
                          65519.99,  65520,    3.39e38, 448,    464};
  double below = 0;
  for (std::uint32_t code = 1; code < 0x7FFF;
       code += codes == Codes::f16 || codes == Codes::bf16 ? 7 : 1) {
    if (code > 0x7E && trait(codes).bits == 8) break;
    const auto half = static_cast<std::uint16_t>(code);
    const double value = codes == Codes::bf16     ? double{bf16_to_f32(half)}
                         : codes == Codes::f16    ? double{f16_to_f32(half)}
                         : trait(codes).bits == 8 ? double{trait(codes).values[code]}
                                                  : double{float_of(code << 15)};
    if (!std::isfinite(value)) break;
    for (const double x : {value, (below + value) / 2, value + (value - below) / 2})
      for (const double nudge : {0.0, 0x1p-30, -0x1p-30, 0x1p-52, -0x1p-52})
        all.push_back(x + x * nudge);
    below = value;
  }
  const std::size_t positive = all.size();
  for (std::size_t i = 0; i < positive; ++i) all.push_back(-all[i]);
  return all;
}

STOWAGE_ON_EACH_ISA(Quantize, CastsRoundOnceAtEveryEdge) {
  for (const Codes codes : kCasts) {
    const std::vector<double> edges = edges_of(codes);
    const Shape shape{static_cast<std::int64_t>(edges.size())};
    for (const Dtype in : {Dtype::f64, Dtype::f32}) {
      const Bytes values = as_type(edges, in);
      EXPECT_TRUE(quantized(table, values, in, shape, {codes}, {true, &inline_executor()}).bytes ==
                  reference_parts(values, in, shape, {codes}, true).bytes)
          << disk_name(in) << " to " << trait(codes).name;
    }
  }
}

STOWAGE_ON_EACH_ISA(Quantize, EveryStorageShapeAndTypeOfInput) {
  for (const std::string& name : every_storage()) {
    const Storage storage = parse_storage(name);
    for (const Shape& shape : shapes()) {
      if (!holds(storage, shape)) continue;
      for (const Dtype in : kValueTypes) {
        for (const Kind kind : kKinds) {
          if (shape.elements() > 10000 && kind != Kind::normal) continue;  // the reference is slow
          const Bytes& values = numbers_as(in, kind, shape);
          const Parts got = quantized(table, values, in, shape, storage);
          const Parts& expected = reference_parts(values, in, shape, storage);
          for (std::size_t part = 0; part < got.bytes.size(); ++part)
            EXPECT_TRUE(got.bytes[part] == expected.bytes[part])
                << name << to_string(shape) << " from " << disk_name(in) << ", kind "
                << static_cast<int>(kind) << ", part " << got.layout.parts[part].name;
        }
      }
    }
  }
}

// Groups of more than a task, of a task and less, that restart inside of a row of them.
STOWAGE_ON_EACH_ISA(Quantize, LongRowsOfGroups) {
  const Shape shape{3, 140002};
  const Bytes values =
      as_type(numbers(Kind::normal, static_cast<std::size_t>(shape.elements())), Dtype::bf16);
  for (const char* name :
       {"int8:block2", "f8_e4m3:block1000", "int8:block139000:zero", "f4_e2m1:block34:e8m0",
        "int4:block6:bf16:zero", "nvfp4", "nvfp4:row", "int8:row", "f8_e4m3:block2x200000",
        "f8_e4m3:block2x139999", "int8:block2x3"}) {
    const Storage storage = parse_storage(name);
    EXPECT_TRUE(quantized(table, values, Dtype::bf16, shape, storage).bytes ==
                reference_parts(values, Dtype::bf16, shape, storage).bytes)
        << name;
  }
}

// Scaled inputs on each threshold, next to it and at both ends: absmax is 1.
STOWAGE_ON_EACH_ISA(Quantize, FourBitCodesAtEveryThreshold) {
  for (const Codes codes : {Codes::nf4, Codes::fp4}) {
    std::vector<double> inputs;
    for (const float t : reference::thresholds4(codes)) {
      const float up = std::nextafter(t, 2.0f), down = std::nextafter(t, -2.0f);
      inputs.insert(inputs.end(), {1.0, -1.0, t, up, down, 0.0, -0.0});
    }
    for (const char* block : {":block32", ":block4096"}) {  // whole blocks, then a short one
      const Storage storage = parse_storage(std::string(trait(codes).name) + block);
      const Bytes values = as_type(inputs, Dtype::f32);
      const Shape shape{static_cast<std::int64_t>(inputs.size())};
      EXPECT_TRUE(quantized(table, values, Dtype::f32, shape, storage).bytes ==
                  reference_parts(values, Dtype::f32, shape, storage).bytes)
          << to_string(storage);
    }
  }
}

void expect_as_reference(const Kernels& table, const std::vector<double>& inputs,
                         std::initializer_list<const char*> names) {
  const Shape shape{1, static_cast<std::int64_t>(inputs.size())};
  for (const char* name : names)
    for (const Dtype in : {Dtype::f64, Dtype::f32}) {
      const Storage storage = parse_storage(name);
      const Bytes values = as_type(inputs, in);
      EXPECT_TRUE(quantized(table, values, in, shape, storage).bytes ==
                  reference_parts(values, in, shape, storage).bytes)
          << name << " from " << disk_name(in);
    }
}

// Every midpoint of E2M1 and its neighbours, under a scale of 1; beyond 6, which the power of two
// of MX leaves to saturate; and both zeros.
STOWAGE_ON_EACH_ISA(Quantize, E2m1CodesAtEveryMidpoint) {
  std::vector<double> inputs{7.99, 0.0, -0.0, 0x1p-140};
  for (const float middle : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 6.0f, 7.0f})
    for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 9.0f)})
      inputs.insert(inputs.end(), {x, -x});
  expect_as_reference(table, inputs, {"f4_e2m1:block1024:e8m0", "f4_e2m1:tensor"});
}

// Sixteen values that are scaled to a largest one: each, each midpoint and its neighbours, under a
// scale of 1, and both zeros.
STOWAGE_ON_EACH_ISA(Quantize, SixteenValuesAtEveryMidpoint) {
  for (const FormRow& row : form_rows()) {
    const FormatTrait& format = trait(row.codes);
    const bool scaled = row.codec == Codec::amax || row.legal.rounded;
    if (format.values.size() != 16 || !scaled) continue;
    std::vector<float> values(format.values.begin(), format.values.end());
    std::ranges::sort(values);
    std::vector<double> inputs{format.divisor, 0.0, -0.0, 0x1p-140, -0x1p-140};
    for (std::size_t i = 0; i < 16; ++i) {
      const float middle = (values[i] + values[i == 15 ? i : i + 1]) / 2;
      for (const float x :
           {values[i], middle, std::nextafter(middle, -99.0f), std::nextafter(middle, 99.0f)})
        if (std::fabs(x) <= format.divisor) inputs.push_back(x);
    }
    if (inputs.size() % 2 != 0) inputs.push_back(format.divisor);
    const std::string name = std::string(format.name) + ":tensor";
    if (!row.legal.rounded) expect_as_reference(table, inputs, {name.c_str()});
    std::vector<std::string> with_zeros;
    if (row.legal.zero) with_zeros.push_back(name + ":zero");
    if (row.legal.sum) with_zeros.push_back(name + ":zero_sum");
    if (row.legal.rounded) with_zeros.push_back(name + ":zero_rounded");
    for (const float zero : {0.0f, 5.0f}) {  // from -zero to 15 - zero, in steps of 1
      std::vector<double> from{-zero, 15.0f - zero, 0.0, -0.0, 0x1p-140, -0x1p-140};
      for (float middle = 0.5f - zero; middle < 15.0f - zero; ++middle)
        for (const float x : {std::nextafter(middle, -9.0f), middle, std::nextafter(middle, 99.0f)})
          from.push_back(x);
      if (from.size() % 2 != 0) from.push_back(1);
      for (const std::string& each : with_zeros) expect_as_reference(table, from, {each.c_str()});
    }
  }
}

STOWAGE_ON_EACH_ISA(Quantize, KeepsNanAndInfinityWhereAsked) {
  std::vector<double> inputs = numbers(Kind::normal, 200);
  inputs[3] = kNan, inputs[64] = kInf, inputs[130] = -kInf, inputs[131] = -kNan, inputs[199] = kNan;
  for (const char* name : {"f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "nf4", "fp4:block32"}) {
    const Storage storage = parse_storage(name);
    for (const Dtype in : kValueTypes) {
      const Bytes values = as_type(inputs, in);
      EXPECT_TRUE(quantized(table, values, in, {200}, storage, {true, &inline_executor()}).bytes ==
                  reference_parts(values, in, {200}, storage, true).bytes)
          << name << " from " << disk_name(in);
    }
  }
}

STOWAGE_ON_EACH_ISA(Quantize, RefusesNanAndInfinityByIndex) {
  for (const std::string& name : storages()) {
    const Storage storage = parse_storage(name);
    const Shape shape{3, 5, 41};
    std::vector<double> inputs = numbers(Kind::normal, 615);
    inputs[417] = kNan;
    inputs[500] = -kInf;
    for (const Dtype in : kValueTypes)
      EXPECT_STOWAGE_ERROR(quantized(table, as_type(inputs, in), in, shape, storage),
                           invalid_argument, "got nan at element 417");
    inputs[417] = 0;
    const bool kept = storage.scaling.kind == Scaling::Kind::none ||
                      (trait(storage.codes).bits == 4 && !storage.scaling.nested);
    if (kept) continue;
    EXPECT_STOWAGE_ERROR(
        quantized(table, as_type(inputs, Dtype::f32), Dtype::f32, shape, storage,
                  {true, &inline_executor()}),
        invalid_argument,
        "values must be finite in " + to_string(storage) + ", got -inf at element 500");
  }
}

STOWAGE_ON_EACH_ISA(Quantize, RefusesDoublesThatScaledStoragesCannotSee) {
  std::vector<double> inputs(64, 1.0);
  inputs[9] = 1e39;
  const Bytes values = as_type(inputs, Dtype::f64);
  for (const char* name : {"int8", "f8_e4m3:tensor", "nf4"})
    EXPECT_STOWAGE_ERROR(quantized(table, values, Dtype::f64, {64}, parse_storage(name)),
                         invalid_argument, "at element 9");
  EXPECT_TRUE(quantized(table, values, Dtype::f64, {64}, {Codes::f32}).bytes ==
              reference_parts(values, Dtype::f64, {64}, {Codes::f32}).bytes);
}

// Inputs of every length against a fence on either side of inputs and codes.
template <class Kernel>
void check_lengths(Dtype in, int code_bits, Kernel&& kernel) {
  constexpr std::size_t kLongest = 3 * 64 + 1;
  const Bytes all = as_type(numbers(Kind::wide, kLongest), in);
  const Fenced inputs(all.size()), outputs(kLongest * 4);
  for (std::size_t n = 0; n <= kLongest; ++n) {
    const auto values = std::span<const std::byte>(all).first(n * width(in));
    const std::size_t bytes = (n * static_cast<std::size_t>(code_bits) + 7) / 8;
    Bytes expected(bytes + 1);
    kernel(values.data(), static_cast<std::int64_t>(n), expected.data());
    for (const auto against : {Fenced::Against::end, Fenced::Against::begin}) {
      char* codes = outputs.piece(bytes, against);
      kernel(inputs.piece(values, against), static_cast<std::int64_t>(n), codes);
      ASSERT_EQ(std::memcmp(codes, expected.data(), bytes), 0) << disk_name(in) << " n " << n;
    }
  }
}

STOWAGE_ON_EACH_ISA(Quantize, TouchesNothingOutsideItsInputsAndCodes) {
  const QuantizeKernels& kernels = table.quantize;
  for (const Dtype in : kValueTypes) {
    const int i = value_index(in);
    check_lengths(in, 0, [&](const void* x, std::int64_t n, void*) { kernels.amax[i](x, n); });
    check_lengths(in, 0, [&](const void* x, std::int64_t n, void*) {
      std::uint32_t most[100];
      kernels.amaxes[i]({x, n, 38}, most);
      Extremes ends[100];
      kernels.reach[i](x, n, 38, ends);
    });
    for (int codes = 0; codes < kCodesCount; ++codes) {
      const int bits = formats()[static_cast<std::size_t>(codes)].bits;
      for (const auto encode :
           {kernels.encode[codes][i], kernels.divide[codes][i], kernels.encode_from[codes][i]}) {
        if (encode == nullptr) continue;
        check_lengths(in, bits, [&](const void* x, std::int64_t n, void* out) {
          const float r = 0.7f, zero = 1;
          if (n != 0) encode({x, n, n, &r, &zero, out});
        });
        check_lengths(in, bits, [&](const void* x, std::int64_t n, void* out) {
          const std::vector<float> r(100, 0.7f), zeros(100, 1);
          encode({x, n, 38, r.data(), zeros.data(), out});
        });
      }
      if (const auto cast = kernels.cast[codes][i])
        check_lengths(in, bits, [&](const void* x, std::int64_t n, void* out) { cast(x, n, out); });
      if (const auto blocks = kernels.blocks[codes][i])
        check_lengths(in, bits, [&](const void* x, std::int64_t n, void* out) {
          float absmax[8];
          blocks({x, n, 32, static_cast<std::uint8_t*>(out), absmax});
        });
    }
  }
}

STOWAGE_ON_EACH_ISA(Quantize, GivesTheSameBytesForEveryNumberOfThreads) {
  const Shape odd{3, 251, 1001}, even{3, 251, 1002};
  const Bytes values =
      as_type(numbers(Kind::normal, static_cast<std::size_t>(even.elements())), Dtype::bf16);
  std::vector<std::string> names =
      covering(form_features, [&](const Storage& storage) { return holds(storage, even); });
  names.insert(names.end(), {"f8_e4m3:block100", "fp4:block128:nested"});
  for (const std::string& name : names) {
    const Storage storage = parse_storage(name);
    const Shape& shape = holds(storage, odd) ? odd : even;
    const Parts expected = reference_parts(values, Dtype::bf16, shape, storage);
    for (const int threads : {1, 2, 3, 5}) {
      const auto pool = make_pool(threads);
      const Parts got =
          quantized(table, values, Dtype::bf16, shape, storage, {.executor = pool.get()});
      EXPECT_TRUE(got.bytes == expected.bytes) << name << " on " << threads << " threads";
    }
  }
}

TEST(QuantizeOwned, HoldsTheSameBytesInMemoryOfItsOwn) {
  const Shape shape{5, 77};
  const Bytes values = as_type(numbers(Kind::normal, 385), Dtype::f32);
  for (const std::string& name : storages()) {
    const Storage storage = parse_storage(name);
    const Shape here = storage.scaling.kind == Scaling::Kind::row2 ? Shape{5, 7, 11} : shape;
    const Weight weight = quantize(values.data(), Dtype::f32, here, storage);
    const Parts expected = reference_parts(values, Dtype::f32, here, storage);
    for (std::size_t i = 0; i < expected.bytes.size(); ++i)
      EXPECT_EQ(std::memcmp(weight.part(static_cast<int>(i)), expected.bytes[i].data(),
                            expected.bytes[i].size() - 1),
                0)
          << name;
  }
}

TEST(QuantizeErrors, NameTheRule) {
  const float values[4] = {1, 2, 3, 4};
  std::uint8_t codes[4];
  float scale[2];
  void* parts[] = {codes, scale};
  const Storage row = parse_storage("int8:row");
  EXPECT_STOWAGE_ERROR(quantize_into(values, Dtype::i32, {2, 2}, row, parts), invalid_argument,
                       "quantize: values must be f64, f32, bf16 or f16, got I32");
  EXPECT_STOWAGE_ERROR(quantize_into(values, Dtype::f32, {2, 2}, {Codes::bf16}, parts),
                       invalid_argument, "bf16 must have 1 parts, got 2");
  EXPECT_STOWAGE_ERROR(quantize_into(nullptr, Dtype::f32, {2, 2}, row, parts), invalid_argument,
                       "values must not be null");
  void* missing[] = {codes, nullptr};
  EXPECT_STOWAGE_ERROR(quantize_into(values, Dtype::f32, {2, 2}, row, missing), invalid_argument,
                       "part scale must not be null");
  EXPECT_STOWAGE_ERROR(quantize(values, Dtype::f32, {4}, parse_storage("int8:row2")),
                       invalid_argument, "at least 2 dimensions");
  EXPECT_STOWAGE_ERROR(quantize(values, Dtype::f32, {2, 2}, parse_storage("nf4:torchao")),
                       invalid_argument, "a multiple of 16384 elements");
}

}  // namespace
}  // namespace stowage::quantize_test
