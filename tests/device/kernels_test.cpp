// SPDX-License-Identifier: Apache-2.0
// The kernels of devices and the ops that launch them, on the host, against the reference codec:
// the same bytes.
#include "device/host_stream.h"
#include "device/ops.h"
#include "expect_error.h"
#include "kernel/samples.h"

namespace stowage::device_kernels_test {
namespace {

using namespace stowage::samples;

std::vector<void*> pointers(const Parts& parts) {
  std::vector<void*> made;
  for (const Bytes& part : parts.bytes) made.push_back(const_cast<std::byte*>(part.data()));
  return made;
}
const std::vector<std::string>& served_storages() {
  static const auto all = covering(codec_features, device::has_form);
  return all;
}
Bytes values_of(Kind kind, const Shape& shape, Dtype dtype) {
  return as_type(numbers(kind, static_cast<std::size_t>(shape.elements())), dtype);
}

Bytes dequantized(const Parts& parts, const Storage& storage, const Shape& shape, Dtype out) {
  HostStream stream;
  Bytes values(static_cast<std::size_t>(shape.elements()) * width(out));
  device::dequantize(stream, storage, shape, pointers(parts), values.data(), out);
  return values;
}

struct Quantized {
  Parts parts;
  std::uint32_t refused;
};
Quantized quantized(const Bytes& values, Dtype dtype, const Shape& shape, const Storage& storage) {
  Quantized made{Parts(storage, shape), 0};
  HostStream stream;
  Bytes working(device::working_bytes(storage, shape), std::byte{0x5A});
  device::quantize(stream, values.data(), dtype, shape, storage, made.parts.writable(),
                   working.data());
  std::memcpy(&made.refused, working.data(), sizeof made.refused);
  return made;
}

// Each storage in each shape, with the next of `all` each time, so that storages see all of them.
// Large shapes show no more of these kernels, which take all elements alike.
constexpr std::int64_t kMostElements = 9000;
template <class All, class Body>
void each_case(const All& all, const Body& body) {
  std::size_t next = 0;
  for (const std::string& name : served_storages())
    for (const Shape& shape : shapes())
      if (const Storage storage = parse_storage(name);
          shape.elements() <= kMostElements && holds(storage, shape)) {
        const auto& which = all[next++ % all.size()];
        SCOPED_TRACE(name + " " + to_string(shape));
        ASSERT_NO_FATAL_FAILURE(body(storage, shape, which));
      }
}

TEST(DeviceKernels, DequantizeEveryStorageToEveryType) {
  each_case(kValueTypes, [](const Storage& storage, const Shape& shape, Dtype out) {
    const Bytes values = values_of(Kind::normal, shape, Dtype::f32);
    const Parts parts = reference_parts(values, Dtype::f32, shape, storage);
    ASSERT_EQ(dequantized(parts, storage, shape, out),
              reference_values(parts.weight(storage, shape), out))
        << disk_name(out);
  });
}

TEST(DeviceKernels, QuantizeToEveryStorageFromEveryType) {
  std::vector<std::pair<Dtype, Kind>> inputs;
  for (const Dtype dtype : kValueTypes)
    for (const Kind kind : kKinds) inputs.emplace_back(dtype, kind);
  each_case(inputs, [](const Storage& storage, const Shape& shape, const auto& input) {
    const Bytes values = values_of(input.second, shape, input.first);
    const Quantized made = quantized(values, input.first, shape, storage);
    const std::string said =
        std::string(disk_name(input.first)) + " " + std::to_string(static_cast<int>(input.second));
    ASSERT_EQ(made.parts.bytes, reference_parts(values, input.first, shape, storage).bytes) << said;
    ASSERT_LT(made.refused, 0x7F800000u) << said;
  });
}

}  // namespace
}  // namespace stowage::device_kernels_test
