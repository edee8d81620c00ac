// SPDX-License-Identifier: Apache-2.0
// The kernels of devices and the ops that launch them, on the host, against the reference codec:
// the same bytes.
#include "device/host_stream.h"
#include "device/ops.h"
#include "expect_error.h"
#include "kernel/samples.h"
#include "stowage/quantize.h"

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
  std::size_t next = 0, seen = 0;
  for (const std::string& name : served_storages())
    for (const Shape& shape : shapes())
      if (const Storage storage = parse_storage(name);
          shape.elements() <= kMostElements && holds(storage, shape)) {
        if (seen++ % HostStream::kEvery != 0) continue;
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

// The CPU's kernels have been compared with the reference on their own, and are quick.
Bytes dequantized_on_cpu(const Weight& weight, Dtype out) {
  Bytes values(static_cast<std::size_t>(weight.shape().elements()) * width(out));
  dequantize(weight, {0, weight.rows()}, values.data(), out);
  return values;
}

TEST(DeviceKernels, DequantizeEveryCodeUnderEveryUpperHalfOfAScale) {
  constexpr std::int64_t kScales = 65536, kCodes = 256;
  const Shape shape{kScales, kCodes};
  constexpr std::array kOuts{Dtype::f32, Dtype::bf16, Dtype::f16};
  std::size_t next = 0;
  for (const char* name : {"f8_e4m3:row", "f8_e5m2:row", "int8:row"}) {
    const Storage storage = parse_storage(name);
    Parts parts(storage, shape);
    std::vector<std::uint32_t> scales(kScales);
    for (std::uint32_t i = 0; i < kScales; ++i) scales[i] = i << 16 | (i * 2654435761u >> 16);
    std::memcpy(parts.bytes[1].data(), scales.data(), scales.size() * sizeof scales[0]);
    for (std::size_t i = 0; i < static_cast<std::size_t>(shape.elements()); ++i)
      parts.bytes[0][i] = static_cast<std::byte>(i);
    const Dtype out = kOuts[next++ % kOuts.size()];
    EXPECT_EQ(dequantized(parts, storage, shape, out),
              dequantized_on_cpu(parts.weight(storage, shape), out))
        << name << " to " << disk_name(out);
  }
}

TEST(DeviceKernels, QuantizeEveryFiniteNumberOfSixteenBits) {
  for (const char* name :
       {"f8_e4m3", "f8_e5m2", "bf16", "f16", "f32", "f8_e4m3:row", "f8_e5m2:tensor", "int8:row",
        "nf4", "fp4", "mxfp4", "nvfp4", "int4:block128:bf16:zero", "q4_k", "q6_k",
        "nf4:torchao:block32:scaler1:bf16"})
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
      const Storage storage = parse_storage(name);
      std::vector<std::uint16_t> numbers;
      const std::uint32_t infinity = dtype == Dtype::bf16 ? 0x7F80u : 0x7C00u;
      // Scales and their inverses stay finite: numbers whose groups need more are refused.
      const std::uint32_t most = is_cast(storage)       ? infinity
                                 : dtype == Dtype::bf16 ? 0x4700u
                                                        : infinity;
      for (std::uint32_t bits = 0; bits < 65536; ++bits)
        if ((bits & 0x7FFFu) < most) numbers.push_back(static_cast<std::uint16_t>(bits));
      numbers.resize(numbers.size() / 512 * 512);
      const Shape shape{static_cast<std::int64_t>(numbers.size()) / 512, 512};
      const Bytes values(reinterpret_cast<const std::byte*>(numbers.data()),
                         reinterpret_cast<const std::byte*>(numbers.data() + numbers.size()));
      Parts expected(storage, shape);
      quantize_into(values.data(), dtype, shape, storage, expected.writable());
      const Quantized made = quantized(values, dtype, shape, storage);
      EXPECT_EQ(made.parts.bytes == expected.bytes, true) << name << " of " << disk_name(dtype);
      EXPECT_LT(made.refused, 0x7F800000u) << name;
    }
}

}  // namespace
}  // namespace stowage::device_kernels_test
