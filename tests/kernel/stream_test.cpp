// SPDX-License-Identifier: Apache-2.0
// Copies around the caches, and large outputs that take this way.
#include "kernel/stream.h"

#include "fenced.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::stream_test {
namespace {

using namespace stowage::samples;

TEST(Stream, CopiesEveryLengthToEveryPlaceInALine) {
  Bytes from(400);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7);
  alignas(64) std::byte to[600];
  for (std::size_t place = 0; place < 64; ++place) {
    for (std::size_t n = 0; n <= 300; n += place % 2 == 0 ? 1 : 13) {
      std::memset(to, 0x5A, sizeof to);
      stream_copy(to + 64 + place, from.data() + place, static_cast<std::int64_t>(n));
      stream_done();
      ASSERT_EQ(std::memcmp(to + 64 + place, from.data() + place, n), 0) << place << " " << n;
      ASSERT_EQ(to[63 + place], std::byte{0x5A});
      ASSERT_EQ(to[64 + place + n], std::byte{0x5A});
    }
  }
}

// Large enough to be streamed; the kernels alone write the expected bytes.
STOWAGE_ON_EACH_ISA(StreamedOutput, IsThatOfTheKernels) {
  const Shape shape{8205, 4099};
  const std::int64_t n = shape.elements();
  Bytes codes(static_cast<std::size_t>(n));
  std::mt19937 random(5);
  for (std::byte& b : codes) b = static_cast<std::byte>(random());
  std::vector<float> scales(8205 * 65);  // 8-bit blocks restart at each row
  for (float& s : scales) s = std::ldexp(1.3f, static_cast<int>(random() % 5));
  for (const char* name : {"f8_e4m3", "int8:row", "f8_e5m2:block64", "nf4"}) {
    const Storage storage = parse_storage(name);
    std::vector<const void*> parts{codes.data()};
    if (storage.scaling.kind != Scaling::Kind::none) parts.push_back(scales.data());
    const Weight weight(storage, shape, parts);
    const auto bytes = static_cast<std::size_t>(n) * 2;
    ASSERT_GE(static_cast<std::int64_t>(bytes), kStreamBytes);
    Bytes got(bytes + 6, std::byte{0x5A}), expected(bytes);
    dequantize_with(table, weight, {0, shape.rows()}, got.data() + 2, Dtype::bf16,
                    default_executor());
    for (std::int64_t row = 0; row < shape.rows(); ++row)  // a row alone is not streamed
      dequantize_with(table, weight, {row, row + 1}, expected.data() + row * 4099 * 2, Dtype::bf16,
                      inline_executor());
    EXPECT_EQ(std::memcmp(got.data() + 2, expected.data(), bytes), 0) << name;
    EXPECT_EQ(got[1], std::byte{0x5A});
    EXPECT_EQ(got[bytes + 2], std::byte{0x5A});
  }
}

}  // namespace
}  // namespace stowage::stream_test
