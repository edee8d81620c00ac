// SPDX-License-Identifier: Apache-2.0
// bitsandbytes 0.50 and torchao gave these bytes for these weights (CRC-32 of each part), in fp32,
// bf16, fp16.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "crc32.h"
#include "format/convert.h"
#include "format/reference.h"

namespace stowage {
namespace {

std::vector<float> golden_values() {
  std::vector<float> values(65536);
  std::uint32_t s = 12345;
  for (std::size_t i = 0; i < values.size(); ++i) {
    s = 1664525u * s + 1013904223u;
    const int centred = static_cast<int>(s >> 16 & 0x1fffu) - 4096;
    values[i] = std::ldexp(static_cast<float>(centred) / 4096.0f, -static_cast<int>(i / 64 % 3));
  }
  return values;
}

std::vector<std::byte> golden_input(Dtype dtype, std::size_t n = 65536) {
  const std::vector<float> values = golden_values();
  const auto width = static_cast<std::size_t>(bits(dtype) / 8);
  std::vector<std::byte> bytes(n * width);
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t element = bits_of(values[i]);
    if (dtype == Dtype::bf16) element = f32_to_bf16(values[i]);
    if (dtype == Dtype::f16) element = f32_to_f16(values[i]);
    std::memcpy(bytes.data() + i * width, &element, width);
  }
  return bytes;
}

struct Packed {
  std::vector<std::vector<std::byte>> parts;
  std::vector<std::byte> decoded;
  std::uint32_t crc(std::size_t part) const {
    return test::crc32(parts[part].data(), parts[part].size());
  }
};

Packed pack(const char* text, Dtype dtype, const Shape& shape) {
  const Storage storage = storage_for_values(parse_storage(text), dtype);
  const auto input = golden_input(dtype, static_cast<std::size_t>(shape.elements()));
  const Layout made = layout(storage, shape);
  Packed packed;
  std::vector<void*> pointers;
  for (int i = 0; i < made.count; ++i) {
    packed.parts.emplace_back(made.parts[static_cast<std::size_t>(i)].bytes);
    pointers.push_back(packed.parts.back().data());
  }
  reference::quantize(input.data(), dtype, shape, storage, pointers);
  packed.decoded.resize(input.size());
  const std::vector<const void*> parts(pointers.begin(), pointers.end());
  reference::dequantize(Weight(storage, shape, parts), packed.decoded.data(), dtype);
  return packed;
}

std::uint32_t crc(const std::vector<std::byte>& bytes) {
  return test::crc32(bytes.data(), bytes.size());
}

struct Golden {
  Dtype dtype;
  std::uint32_t input, packed, absmax, decoded;
  std::uint32_t nested_codes, nested_absmax, nested_decoded;
  float offset;
};

class GoldenNf4 : public testing::TestWithParam<Golden> {};
INSTANTIATE_TEST_SUITE_P(
    Dtypes, GoldenNf4,
    testing::Values(Golden{Dtype::f32, 0x666d504a, 0xe495b6f3, 0xb728e840, 0x07c9d891, 0x6b3f2276,
                           0x6e564f4a, 0x3a5396de, 0x1.2647a4p-1f},
                    Golden{Dtype::bf16, 0xdf050962, 0x6e7a4733, 0x4fa8f019, 0x7d8d6e8e, 0x1990c1eb,
                           0x09522869, 0xa8820835, 0x1.26492p-1f},
                    Golden{Dtype::f16, 0xec90b0b4, 0xa0cc314e, 0x94d48c14, 0x729e54af, 0x107c46eb,
                           0x472c63cd, 0x0f1ca31e, 0x1.26485cp-1f}),
    [](const auto& row) { return std::string(disk_name(row.param.dtype)); });

TEST_P(GoldenNf4, InputIsTheOneThatWasPacked) {
  EXPECT_EQ(crc(golden_input(GetParam().dtype)), GetParam().input);
}

TEST_P(GoldenNf4, BlocksEqualBitsandbytes) {
  const Packed packed = pack("nf4", GetParam().dtype, {256, 256});
  EXPECT_EQ(packed.crc(0), GetParam().packed);
  EXPECT_EQ(packed.crc(1), GetParam().absmax);
  EXPECT_EQ(crc(packed.decoded), GetParam().decoded);
}

TEST_P(GoldenNf4, NestedBlocksEqualBitsandbytes) {
  const Packed packed = pack("nf4:nested", GetParam().dtype, {256, 256});
  EXPECT_EQ(packed.crc(0), GetParam().packed);
  EXPECT_EQ(packed.crc(1), GetParam().nested_codes);
  EXPECT_EQ(packed.crc(2), GetParam().nested_absmax);
  EXPECT_EQ(packed.crc(3), 0x1b137aebu);
  float offset = 0;
  std::memcpy(&offset, packed.parts[4].data(), sizeof offset);
  EXPECT_EQ(offset, GetParam().offset);
  EXPECT_EQ(crc(packed.decoded), GetParam().nested_decoded);
}

struct GoldenAo {
  Dtype dtype;
  std::uint32_t packed, scalers, factor, decoded;
  double mean;
};

class GoldenTorchao : public testing::TestWithParam<GoldenAo> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, GoldenTorchao,
                         testing::Values(GoldenAo{Dtype::f32, 0x4f411f88, 0x15fcc44d, 0x30d12f65,
                                                  0x51159966, 0x1.2647a4p-1},
                                         GoldenAo{Dtype::bf16, 0x6919114a, 0x7b1a59dc, 0x0f7b6a6b,
                                                  0x5a7826de, 0x1.26p-1},
                                         GoldenAo{Dtype::f16, 0xf58beb28, 0x72960da8, 0x91bcdce7,
                                                  0xc1f21cbc, 0x1.264p-1}),
                         [](const auto& row) { return std::string(disk_name(row.param.dtype)); });

TEST_P(GoldenTorchao, PartsAndValuesEqualTorchao) {
  const Packed packed = pack("nf4:torchao", GetParam().dtype, {256, 256});
  EXPECT_EQ(packed.crc(0), GetParam().packed);
  EXPECT_EQ(packed.crc(1), GetParam().scalers);
  EXPECT_EQ(packed.crc(2), GetParam().factor);
  EXPECT_EQ(reference::read(packed.parts[3].data(), GetParam().dtype, 0), GetParam().mean);
  EXPECT_EQ(crc(packed.decoded), GetParam().decoded);
}

TEST(GoldenNf4Ragged, AShortLastBlockEqualsBitsandbytes) {
  const Packed packed = pack("nf4", Dtype::f32, {1000});
  EXPECT_EQ(packed.crc(0), 0x5b581b20u);
  EXPECT_EQ(packed.crc(1), 0xffd99626u);
  EXPECT_EQ(crc(packed.decoded), 0xb02ace1bu);
}

TEST(GoldenNf4Ragged, AnOddLengthIsPaddedWithZero) {
  const Packed packed = pack("nf4", Dtype::f32, {999});
  EXPECT_EQ(packed.parts[0].size(), 500u);
  EXPECT_EQ(packed.parts[0].back(), std::byte{0x27});
  EXPECT_EQ(packed.crc(0), 0x52ee570bu);
  EXPECT_EQ(packed.crc(1), 0xffd99626u);
  EXPECT_EQ(crc(packed.decoded), 0xca2609beu);
}

}  // namespace
}  // namespace stowage
