// SPDX-License-Identifier: Apache-2.0
// nf4:torchao from every type of value, on every instruction set, against the reference codec.
#include "kernel/quantize_torchao.h"

#include "base/threads.h"
#include "expect_error.h"
#include "format/torchao.h"
#include "kernel/drivers.h"
#include "kernel/tables.h"
#include "samples.h"

namespace stowage::quantize_torchao_test {
namespace {

using namespace stowage::samples;
Parts quantized(const Kernels& table, const Bytes& values, Dtype dtype, const Shape& shape,
                const Storage& storage, Executor& executor = inline_executor()) {
  Parts parts(storage, shape);
  quantize_with(table, values.data(), dtype, shape, storage, parts.writable(),
                {.executor = &executor});
  return parts;
}

STOWAGE_ON_EACH_ISA(QuantizeTorchao, EveryDtypeBlockAndKindOfValues) {
  for (const char* name :
       {"nf4:torchao:f32", "nf4:torchao:bf16", "nf4:torchao:f16", "nf4:torchao:f64",
        "nf4:torchao:block32:scaler1:bf16", "nf4:torchao:block16:scaler2:f16",
        "nf4:torchao:block4096:scaler2:f16"}) {
    const Storage storage = parse_storage(name);
    const Shape shape{2, 16384};
    for (const Dtype in : kValueTypes)
      for (const Kind kind : kKinds) {
        const Bytes values = as_type(numbers(kind, 32768), in);
        const Parts got = quantized(table, values, in, shape, storage);
        const Parts expected = reference_parts(values, in, shape, storage);
        for (std::size_t part = 0; part < got.bytes.size(); ++part)
          EXPECT_TRUE(got.bytes[part] == expected.bytes[part])
              << name << " from " << disk_name(in) << ", kind " << static_cast<int>(kind)
              << ", part " << got.layout.parts[part].name;
      }
  }
}

// Every bf16 and fp16 number of [-1, 1] as a quotient: each block holds a 1.
STOWAGE_ON_EACH_ISA(QuantizeTorchao, EveryQuotientOfSixteenBits) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    const auto one = static_cast<std::uint16_t>(dtype == Dtype::bf16 ? 0x3F80 : 0x3C00);
    std::vector<std::uint16_t> all;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      if (all.size() % 64 == 0) all.push_back(one);
      if ((bits & 0x7FFF) <= one) all.push_back(static_cast<std::uint16_t>(bits));
    }
    all.resize((all.size() + 16383) / 16384 * 16384, one);
    Bytes values(all.size() * 2);
    std::memcpy(values.data(), all.data(), values.size());
    const Shape shape{static_cast<std::int64_t>(all.size())};
    const Storage storage = storage_for_values(parse_storage("nf4:torchao"), dtype);
    EXPECT_TRUE(quantized(table, values, dtype, shape, storage).bytes ==
                reference_parts(values, dtype, shape, storage).bytes)
        << disk_name(dtype);
  }
}

STOWAGE_ON_EACH_ISA(QuantizeTorchao, SinglesOnAndBesideEveryThreshold) {
  std::vector<double> inputs;
  while (inputs.size() < 16384) {
    for (int k = 0; k < 15 && inputs.size() < 16384; ++k) {
      if (inputs.size() % 64 == 0) inputs.push_back(1);
      const float t = torchao_thresholds(Dtype::f32)[k];
      const auto steps = static_cast<int>(inputs.size() % 5) - 2;
      inputs.push_back(double{float_of(bits_of(t) + static_cast<std::uint32_t>(steps))});
    }
  }
  const Bytes values = as_type(inputs, Dtype::f32);
  const Storage storage = parse_storage("nf4:torchao:f32");
  EXPECT_TRUE(quantized(table, values, Dtype::f32, {16384}, storage).bytes ==
              reference_parts(values, Dtype::f32, {16384}, storage).bytes);
}

STOWAGE_ON_EACH_ISA(QuantizeTorchao, TheSameBytesForEveryNumberOfThreads) {
  const Shape shape{64, 8192};
  const Bytes values = as_type(numbers(Kind::normal, 1 << 19), Dtype::f32);
  for (const char* name : {"nf4:torchao:f32", "nf4:torchao:bf16"}) {
    const Storage storage = parse_storage(name);
    const Parts alone = quantized(table, values, Dtype::f32, shape, storage);
    for (const int threads : {2, 3})
      EXPECT_TRUE(quantized(table, values, Dtype::f32, shape, storage, *make_pool(threads)).bytes ==
                  alone.bytes)
          << name << " on " << threads;
  }
}

STOWAGE_ON_EACH_ISA(QuantizeTorchao, RefusesWhatIsNotFiniteInTheTypeItCameIn) {
  for (const Dtype in : kValueTypes) {
    std::vector<double> inputs(16384, 0.5);
    inputs[300] = -std::numeric_limits<double>::infinity();
    for (const char* name : {"nf4:torchao:f32", "nf4:torchao:f16", "nf4:torchao:f64"})
      EXPECT_STOWAGE_ERROR(quantized(table, as_type(inputs, in), in, {16384}, parse_storage(name)),
                           invalid_argument,
                           "values must be finite in " + std::string(name) +
                               ", got -inf at "
                               "element 300");
  }
}

TEST(TorchaoThresholds, AreWhereTheRuleChangesItsCode) {
  for (int k = 0; k < 15; ++k) {
    const float t = torchao_thresholds(Dtype::f32)[k];
    EXPECT_EQ(torchao::encode<torchao::F32>(t), k);
    EXPECT_EQ(torchao::encode<torchao::F32>(std::nextafter(t, 2.0f)), k + 1);
  }
}

TEST(QuantizeOwned, TakesTheTypeOfTheValues) {
  const Bytes values = as_type(numbers(Kind::normal, 16384), Dtype::bf16);
  const Weight weight =
      quantize(values.data(), Dtype::bf16, {128, 128}, parse_storage("nf4:torchao"));
  EXPECT_EQ(to_string(weight.storage()), "nf4:torchao:bf16");
  EXPECT_EQ(weight.bytes(), 8192 + 256 + 2 + 2 + 32);
}

}  // namespace
}  // namespace stowage::quantize_torchao_test
