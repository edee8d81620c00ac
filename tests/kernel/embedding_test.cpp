// SPDX-License-Identifier: Apache-2.0
// Looking up rows gives the rows of dequantize.
#include "base/threads.h"
#include "expect_error.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::embedding_test {
namespace {

using namespace stowage::samples;
STOWAGE_ON_EACH_ISA(Embedding, GivesTheRowsOfEveryStorage) {
  const std::vector<std::int64_t> ids{0, 12, 3, 3, 11, 1, 0, 7};
  for (const std::string& name : every_storage()) {
    const Storage storage = parse_storage(name);
    for (const Shape& shape : {Shape{13, 67}, Shape{13, 3, 128}, Shape{13, 1}, Shape{13, 64}}) {
      if (!holds(storage, shape)) continue;
      const auto n = static_cast<std::size_t>(shape.elements());
      const Parts parts =
          reference_parts(as_type(numbers(Kind::wide, n), Dtype::f32), Dtype::f32, shape, storage);
      const Weight weight = parts.weight(storage, shape);
      for (const Dtype out : kValueTypes) {
        const Bytes all = reference_values(weight, out);
        const auto row = static_cast<std::size_t>(shape.row_elements()) * width(out);
        Bytes got(ids.size() * row + 1, std::byte{0x5A});
        embedding_with(table, weight, ids.data(), static_cast<std::int64_t>(ids.size()), got.data(),
                       out, inline_executor());
        for (std::size_t i = 0; i < ids.size(); ++i)
          EXPECT_EQ(std::memcmp(got.data() + i * row,
                                all.data() + static_cast<std::size_t>(ids[i]) * row, row),
                    0)
              << name << to_string(shape) << " to " << disk_name(out) << " id " << ids[i];
        EXPECT_EQ(got.back(), std::byte{0x5A});
      }
    }
  }
}

STOWAGE_ON_EACH_ISA(Embedding, GivesTheSameBytesForEveryNumberOfThreads) {
  const Shape shape{100, 1000};
  const Storage storage = parse_storage("nf4:block64:nested");
  const Parts parts = reference_parts(as_type(numbers(Kind::normal, 100000), Dtype::f32),
                                      Dtype::f32, shape, storage);
  const Weight weight = parts.weight(storage, shape);
  const Bytes all = reference_values(weight, Dtype::bf16);
  std::vector<std::int64_t> ids;
  Bytes expected;
  for (std::int64_t i = 0; i < 700; ++i) {
    ids.push_back(i * 37 % 100);
    const auto row = all.begin() + ids.back() * 2000;
    expected.insert(expected.end(), row, row + 2000);
  }
  for (const int threads : {1, 2, 3, 5}) {
    Bytes got(expected.size());
    embedding_with(table, weight, ids.data(), 700, got.data(), Dtype::bf16, *make_pool(threads));
    EXPECT_TRUE(got == expected) << threads;
  }
}

TEST(EmbeddingErrors, NameTheId) {
  const std::uint8_t codes[6] = {};
  const Weight weight(parse_storage("f8_e4m3"), {2, 3}, std::vector<const void*>{codes});
  float out[6];
  const std::int64_t high[] = {0, 2}, low[] = {-1};
  EXPECT_STOWAGE_ERROR(embedding(weight, high, 2, out, Dtype::f32), out_of_range,
                       "embedding: ids must lie in [0, 2), got 2 at 1");
  EXPECT_STOWAGE_ERROR(embedding(weight, low, 1, out, Dtype::f32), out_of_range, "got -1 at 0");
  EXPECT_STOWAGE_ERROR(embedding(weight, nullptr, 1, out, Dtype::f32), invalid_argument, "null");
  EXPECT_STOWAGE_ERROR(embedding(weight, high, -1, out, Dtype::f32), invalid_argument, "n = -1");
  EXPECT_STOWAGE_ERROR(embedding(weight, high, 1, nullptr, Dtype::f32), invalid_argument, "null");
  EXPECT_STOWAGE_ERROR(embedding(weight, high, 1, out, Dtype::i8), invalid_argument, "got I8");
  embedding(weight, nullptr, 0, nullptr, Dtype::f32);
}

}  // namespace
}  // namespace stowage::embedding_test
