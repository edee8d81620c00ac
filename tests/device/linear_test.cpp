// SPDX-License-Identifier: Apache-2.0
// Products of devices, on the host: within the bound of docs/numbers.md, and the same bytes in
// whatever order lanes and blocks run.
#include <sys/mman.h>

#include "device/host_stream.h"
#include "kernel/linear_cases.h"

namespace stowage::linear_test {
namespace {

Values product(const Values& x, std::int64_t rows, const Weight& weight, const Values* bias,
               device::Facts facts, unsigned threads = 64) {
  const Layout layout = stowage::layout(weight.storage(), weight.shape());
  std::vector<void*> parts;
  for (int i = 0; i < layout.count; ++i) parts.push_back(const_cast<void*>(weight.part(i)));
  Values y{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, rows * weight.shape()[0]))};
  HostStream stream(threads);
  device::linear(
      stream, weight.storage(), weight.shape(), parts,
      {x.dtype, rows, x.data(), bias == nullptr ? nullptr : bias->data(), y.bytes.data()}, facts);
  return y;
}

// Values of fp32 or bf16 times 2^power.
Values times(Values x, int power) {
  const auto width = bytes_of(x.dtype, 1);
  for (std::size_t i = 0; i * width < x.bytes.size(); ++i) {
    const auto large = static_cast<float>(std::ldexp(x[static_cast<std::int64_t>(i)], power));
    const std::uint16_t half = f32_to_bf16(large);
    std::memcpy(&x.bytes[i * width],
                x.dtype == Dtype::f32 ? static_cast<const void*>(&large) : &half, width);
  }
  return x;
}

TEST(DeviceLinear, StaysWithinTheBound) {
  std::size_t next = 0, seen = 0;
  for (const std::string& name : storages())
    for (const Shape& shape : {Shape{5, 96}, Shape{12, 130}, Shape{6, 776}}) {
      const Storage storage = parse_storage(name);
      if (!device::has_form(storage) || !samples::holds(storage, shape)) continue;
      if (seen++ % HostStream::kEvery != 0) continue;
      constexpr Data kData[] = {Data::normal, Data::heavy, Data::adversarial};
      const Data data = kData[next / 3 % 3];
      const Weight weight = make_weight(name, shape, data);
      const Dtype dtype = kDtypes[next % 3];
      const std::int64_t rows = 1 + static_cast<std::int64_t>(next % device::kMostTogether);
      const Values& x = make_values(dtype, rows * shape[1], data, 3);
      const Values& bias = make_values(dtype, shape[0], Data::normal, 4);
      const Values* const given = next++ % 2 == 0 ? &bias : nullptr;
      const std::string what = name + " " + to_string(shape) + " " + disk_name(dtype).data() +
                               " rows " + std::to_string(rows);
      const Values y = product(x, rows, weight, given, {75, 0});
      expect_within_bound(y, exact(x, rows, weight, given), shape[1], what);
      EXPECT_EQ(product(x, rows, weight, given, {75, 0}).bytes, y.bytes) << what;
    }
}

TEST(DeviceLinear, OnTensorCoresStaysWithinTheBoundOfRoundedWeights) {
  std::size_t next = 0, seen = 0;
  for (const std::string& name : storages())
    for (const Shape& shape : {Shape{5, 96}, Shape{35, 256}}) {
      const Storage storage = parse_storage(name);
      if (!device::has_form(storage) || !samples::holds(storage, shape)) continue;
      if (seen++ % HostStream::kEvery != 0) continue;
      const Dtype dtype = next % 2 == 0 ? Dtype::bf16 : Dtype::f16;
      const Data data = next / 2 % 2 == 0 ? Data::normal : Data::adversarial;
      const Weight weight = make_weight(name, shape, data);
      const std::int64_t rows = 1 + static_cast<std::int64_t>(5 * next % device::kMostTogether);
      const Values& x = make_values(dtype, rows * shape[1], data, 3);
      const Values& bias = make_values(dtype, shape[0], Data::normal, 4);
      const Values* const given = next++ % 3 == 0 ? &bias : nullptr;
      const std::string what = name + " " + to_string(shape) + " " + disk_name(dtype).data() +
                               " rows " + std::to_string(rows);
      const Values y = product(x, rows, weight, given, {90, 2}, 256);
      expect_within_bound(y, exact(x, rows, weight, given), shape[1], what);
    }
}

TEST(DeviceLinear, TakesMoreRowsSixteenAtATime) {
  std::size_t seen = 0;
  for (const char* name : {"nf4", "f8_e4m3:row", "q4_k", "int4:block32:f16:zero", "mxfp4"})
    for (const std::int64_t rows : {17, 32, 43})
      for (const int architecture : {75, 90}) {
        if (seen++ % HostStream::kEvery != 0) continue;
        const Weight weight = make_weight(name, {20, 256}, Data::normal);
        const Values& x = make_values(Dtype::bf16, rows * 256, Data::normal, 3);
        const Values& bias = make_values(Dtype::bf16, 20, Data::normal, 4);
        const std::string what = std::string(name) + " rows " + std::to_string(rows) + " on " +
                                 std::to_string(architecture);
        const Values y = product(x, rows, weight, &bias, {architecture, 1}, 256);
        expect_within_bound(y, exact(x, rows, weight, &bias), 256, what);
      }
}

TEST(DeviceLinear, TakesMoreRowsWhereTensorCoresDo) {
  const auto most = [](const char* storage, const Shape& shape, Dtype dtype, int architecture) {
    return device::most_rows(parse_storage(storage), dtype, shape, {architecture, 1});
  };
  EXPECT_EQ(most("nf4", {8, 128}, Dtype::bf16, 90), 64);
  EXPECT_EQ(most("f8_e4m3", {8, 128}, Dtype::f16, 80), 64);
  EXPECT_EQ(most("nf4", {8, 128}, Dtype::bf16, 75), 16);
  EXPECT_EQ(most("nf4", {8, 128}, Dtype::f32, 90), 16);
  EXPECT_EQ(most("nf4", {8, 128}, Dtype::f64, 90), 16);
  EXPECT_EQ(most("nf4", {8, 100}, Dtype::bf16, 90), 16);  // no whole pieces
}

// Of x and w so large and scales so small that only the products of values are within fp32.
TEST(DeviceLinear, SumsThatOverflowBeforeTheirScaleDoNotAfter) {
  std::size_t seen = 0;
  for (const char* storage : {"f8_e5m2:row", "int8:row", "int8:block32", "int4:block64", "nf4"})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const std::int64_t rows : {1, 3, 20})
        for (const int architecture : {75, 90}) {
          if (seen++ % HostStream::kEvery != 0) continue;
          const std::int64_t lines = 9, depth = 256;
          const Weight weight = make_weight(storage, {lines, depth}, Data::normal, 2);
          const std::vector<float> scales(
              static_cast<std::size_t>(layout(weight.storage(), weight.shape()).parts[1].bytes) / 4,
              0x1p-20f);
          const void* parts[] = {weight.part(0), scales.data()};
          const Weight small(weight.storage(), weight.shape(), parts);
          const Values x = times(make_values(dtype, rows * depth, Data::normal, 3), 125);
          expect_within_bound(product(x, rows, small, nullptr, {architecture, 1}, 256),
                              exact(x, rows, small, nullptr), depth,
                              std::string(storage) + " rows " + std::to_string(rows) + " on " +
                                  std::to_string(architecture));
        }
}

// --- by groups -----------------------------------------------------------------------------------

using Ends = std::vector<std::int32_t>;

Values grouped(const Values& x, std::int64_t rows, const Weight& weight, const Ends& ends,
               const Values* bias, device::Facts facts) {
  const Layout layout = stowage::layout(weight.storage(), weight.shape());
  std::vector<void*> parts;
  for (int i = 0; i < layout.count; ++i) parts.push_back(const_cast<void*>(weight.part(i)));
  Values y{x.dtype,
           std::vector<std::byte>(bytes_of(x.dtype, rows * weight.shape()[1]), std::byte{0xFF})};
  HostStream stream(256);
  device::grouped_linear(
      stream, weight.storage(), weight.shape(), parts,
      {x.dtype, rows, x.data(), bias == nullptr ? nullptr : bias->data(), y.bytes.data()},
      ends.data(), facts);
  return y;
}

// One number after the other; no rows are those behind the last end.
Exact exact_by_groups(const Values& x, std::int64_t rows, const Weight& weight, const Ends& ends,
                      const Values* bias) {
  const Shape& shape = weight.shape();
  const std::int64_t lines = shape[1], depth = shape[2];
  Values w{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, shape.elements()))};
  reference::dequantize(weight, w.bytes.data(), x.dtype);
  Exact made{std::vector<double>(static_cast<std::size_t>(rows * lines)),
             std::vector<double>(static_cast<std::size_t>(rows * lines))};
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < shape[0]; ++e)
    for (; row < ends[static_cast<std::size_t>(e)]; ++row)
      for (std::int64_t o = 0; o < lines; ++o) {
        double sum = bias == nullptr ? 0 : (*bias)[e * lines + o], magnitude = std::abs(sum);
        for (std::int64_t k = 0; k < depth; ++k) {
          const double product = x[row * depth + k] * w[(e * lines + o) * depth + k];
          sum += product, magnitude += std::abs(product);
        }
        made.y[static_cast<std::size_t>(row * lines + o)] = sum;
        made.magnitude[static_cast<std::size_t>(row * lines + o)] = magnitude;
      }
  return made;
}

TEST(DeviceLinear, ByGroupsStaysWithinTheBound) {
  const Ends cases[] = {{0, 3, 3, 5}, {1, 2, 3, 4}, {0, 0, 0, 21}, {19, 19, 20, 23}, {0, 0, 0, 0}};
  std::size_t next = 0, seen = 0, on_tiles = 0;
  for (const std::string& name : storages())
    for (const Shape& shape : {Shape{4, 5, 96}, Shape{4, 18, 256}, Shape{4, 6, 36}}) {
      const Storage storage = parse_storage(name);
      if (!device::has_form(storage) || describe(storage).transposed) continue;
      if (!samples::holds(storage, shape) || seen++ % HostStream::kEvery != 0) continue;
      const bool has_cores = next % 2 == 0;
      const Dtype dtype =
          has_cores ? (next / 2 % 2 == 0 ? Dtype::bf16 : Dtype::f16) : kDtypes[next / 2 % 3];
      const Data data = next / 3 % 2 == 0 ? Data::normal : Data::adversarial;
      const Weight weight = make_weight(name, shape, data);
      const Ends& ends = cases[next % 5];
      const std::int64_t rows = ends.back() + static_cast<std::int64_t>(next / 5 % 3);
      const Values& x = make_values(dtype, rows * shape[2], data, 3);
      const Values& bias = make_values(dtype, shape[0] * shape[1], Data::normal, 4);
      const Values* const given = next++ % 3 == 0 ? &bias : nullptr;
      const std::string what = name + " " + to_string(shape) + " " + disk_name(dtype).data() +
                               " rows " + std::to_string(rows) + " of case " +
                               std::to_string((next - 1) % 5);
      const device::Facts facts{has_cores ? 90 : 75, static_cast<int>(next % 3)};
      const Values y = grouped(x, rows, weight, ends, given, facts);
      expect_within_bound(y, exact_by_groups(x, rows, weight, ends, given), shape[2], what);
      on_tiles += has_cores ? 1 : 0;
    }
  EXPECT_GT(on_tiles, HostStream::kEvery == 1 ? 20u : 0u);
}

TEST(DeviceLinear, ReadsNoMatrixWithoutRows) {
  constexpr std::int64_t kMatrices = 4, kLines = 32, kDepth = 128, kPage = kLines * kDepth;
  void* const codes = ::mmap(nullptr, kMatrices * kPage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(codes, MAP_FAILED);
  std::memset(codes, 0x38, kMatrices * kPage);  // 1
  const Storage storage = parse_storage("f8_e4m3:tensor");
  const float scale = 0.5f;
  const Weight weight(storage, {kMatrices, kLines, kDepth},
                      std::vector<const void*>{codes, &scale});
  const Values& x = make_values(Dtype::bf16, 3 * kDepth, Data::normal, 3);
  const Ends ends{0, 2, 2, 3};
  const Exact expected = exact_by_groups(x, 3, weight, ends, nullptr);
  for (const int idle : {0, 2})  // whose bytes end the process that reads one
    ASSERT_EQ(::mprotect(static_cast<std::byte*>(codes) + idle * kPage, kPage, PROT_NONE), 0);
  for (const int architecture : {75, 90})
    expect_within_bound(grouped(x, 3, weight, ends, nullptr, {architecture, 1}), expected, kDepth,
                        std::to_string(architecture));
  ::munmap(codes, kMatrices * kPage);
}

TEST(DeviceLinear, EndsThatDoNotAscendLeadNowhereOutside) {
  const Weight weight = make_weight("f8_e4m3:tensor", {4, 5, 96}, Data::normal);
  const Values& x = make_values(Dtype::bf16, 3 * 96, Data::normal, 3);
  for (const Ends& ends : {Ends{3, 2, 1, 0}, Ends{-7, 9, 2, 1 << 30}, Ends{1, -1, 3, -5}})
    for (const int architecture : {75, 90}) {
      const Values y = grouped(x, 3, weight, ends, nullptr, {architecture, 1});
      for (std::int64_t i = 0; i < 3 * 5; ++i) EXPECT_TRUE(std::isfinite(y[i]));
    }
}

TEST(DeviceLinear, SharesRowsAmongWarpsWhereTheyAreFew) {
  const Weight weight = make_weight("f8_e4m3:row", {3, 4096}, Data::normal);
  const Values& x = make_values(Dtype::bf16, 2 * 4096, Data::normal, 3);
  for (const int processors : {0, 1, 132})  // of 75, which has no tensor cores for bf16
    expect_within_bound(product(x, 2, weight, nullptr, {75, processors}, 256),
                        exact(x, 2, weight, nullptr), 4096, std::to_string(processors));
}

}  // namespace
}  // namespace stowage::linear_test
