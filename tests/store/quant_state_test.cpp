// SPDX-License-Identifier: Apache-2.0
#include "store/quant_state.h"

#include <limits>

#include "expect_error.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

// What bitsandbytes 0.50.2 wrote for Linear4bit(256, 64, compute_dtype=torch.bfloat16).
constexpr const char* kPlain =
    R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 256]})";
constexpr const char* kNested =
    R"({"quant_type": "fp4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 256], )"
    R"("nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2.613861083984375})";

TEST(QuantState, IsWrittenAsBitsandbytesWritesIt) {
  EXPECT_EQ(quant_state(parse_storage("nf4"), {64, 256}, Dtype::bf16), kPlain);
  const std::string nested =
      quant_state(parse_storage("fp4:nested"), {64, 256}, Dtype::bf16, 2.613861083984375F);
  EXPECT_EQ(nested.substr(0, nested.find('}') + 1), kNested);
  EXPECT_EQ(nested.find_first_not_of(' ', nested.find('}') + 1), std::string::npos);
}

TEST(QuantState, ReadsWhatBitsandbytesWrote) {
  const QuantState plain = parse_quant_state({"f", "t", 0}, kPlain);
  EXPECT_EQ(to_string(plain.storage), "nf4:block64");
  EXPECT_EQ(plain.shape, (Shape{64, 256}));
  EXPECT_EQ(plain.compute, Dtype::bf16);
  const QuantState nested = parse_quant_state({"f", "t", 0}, kNested);
  EXPECT_EQ(to_string(nested.storage), "fp4:block64:nested");
  EXPECT_EQ(nested.nested_offset, 2.613861083984375F);
}

// The size is declared before the offset is known, and every offset comes back bit for bit.
TEST(QuantState, HasOneSizeForEveryOffsetAndComputeDtype) {
  const Storage storage = parse_storage("nf4:block128:nested");
  const std::size_t declared =
      static_cast<std::size_t>(disk_layout("w", storage, {3, 7})[4].shape.elements());
  for (const float offset :
       {0.0F, 1.0F, -0.57466602F, 3e38F, 1e-38F, -std::numeric_limits<float>::max(),
        -std::numeric_limits<float>::min(), std::numeric_limits<float>::denorm_min()}) {
    for (const Dtype compute : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16}) {
      const std::string text = quant_state(storage, {3, 7}, compute, offset);
      EXPECT_EQ(text.size(), declared);
      const QuantState back = parse_quant_state({"f", "t", 0}, text);
      EXPECT_EQ(back.nested_offset, offset);
      EXPECT_EQ(back.compute, compute);
      EXPECT_EQ(back.storage, storage);
    }
  }
}

TEST(QuantState, RefusesWhatItCannotSay) {
  const Storage made{Codes::fp4, Dialect::torchao, parse_storage("nf4:torchao:f32").scaling};
  EXPECT_STOWAGE_ERROR(has_quant_state(made), invalid_argument, "storage: must be one of");
  EXPECT_STOWAGE_ERROR(quant_state(parse_storage("int8"), {2, 2}, Dtype::f32), invalid_argument,
                       "must be nf4 or fp4 of the standard dialect, got int8:row");
  EXPECT_STOWAGE_ERROR(quant_state(parse_storage("nf4"), {2, 2}, Dtype::i8), invalid_argument,
                       "got I8");
  EXPECT_STOWAGE_ERROR(quant_state(parse_storage("nf4:nested"), {2, 2}, Dtype::f32,
                                   std::numeric_limits<float>::infinity()),
                       invalid_argument, "must be finite");
}

}  // namespace
}  // namespace stowage
