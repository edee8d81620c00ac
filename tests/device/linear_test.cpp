// SPDX-License-Identifier: Apache-2.0
// Products of devices, on the host: within the bound of docs/numbers.md, and the same bytes in
// whatever order lanes and blocks run.
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
  device::linear(stream, weight.storage(), weight.shape(), parts, x.data(), rows,
                 bias == nullptr ? nullptr : bias->data(), y.bytes.data(), x.dtype, facts);
  return y;
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
      const std::int64_t rows = 1 + static_cast<std::int64_t>(next % device::kMostRows);
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
      const std::int64_t rows = 1 + static_cast<std::int64_t>(5 * next % device::kMostRows);
      const Values& x = make_values(dtype, rows * shape[1], data, 3);
      const Values& bias = make_values(dtype, shape[0], Data::normal, 4);
      const Values* const given = next++ % 3 == 0 ? &bias : nullptr;
      const std::string what = name + " " + to_string(shape) + " " + disk_name(dtype).data() +
                               " rows " + std::to_string(rows);
      const Values y = product(x, rows, weight, given, {90, 2}, 256);
      expect_within_bound(y, exact(x, rows, weight, given), shape[1], what);
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
