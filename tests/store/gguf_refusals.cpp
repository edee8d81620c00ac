// SPDX-License-Identifier: Apache-2.0
// Bad frames of a GGUF file, and types that are not read.
#include "store/made_gguf.h"
#include "store/refusal_rows.h"

namespace stowage::test {
namespace {

constexpr std::uint64_t kHuge = std::uint64_t{1} << 62;

Make model(std::string content) {
  return [content = std::move(content)](const Scratch& s) { s.write("model.gguf", content); };
}
Make model(const std::vector<std::string>& keys, const std::vector<GgufTensor>& tensors,
           std::size_t bytes = 0) {
  return model(gguf(keys, tensors, std::string(bytes, 'x')));
}
std::string start(std::uint32_t version, std::uint64_t tensors, std::uint64_t keys) {
  return "GGUF" + gguf_number(version) + gguf_number(tensors) + gguf_number(keys);
}
// An array of arrays of arrays, so deep.
std::string nested(int depth) {
  std::string made = gguf_number<std::uint32_t>(0) + gguf_number<std::uint64_t>(0);
  for (int i = 1; i < depth; ++i)
    made = gguf_number<std::uint32_t>(9) + gguf_number<std::uint64_t>(1) + made;
  return made;
}

const Rows kGguf{{
    {Refusal::gguf_version, "version 1", model(start(1, 0, 0)), {"byte 4", "got 1"}},
    {Refusal::gguf_version, "big-endian", model(start(3u << 24, 0, 0)), {"50331648"}},
    {Refusal::gguf_frame, "the magic alone", model("GGUF"), {"byte 4", "4 bytes where 0"}},
    {Refusal::gguf_frame, "cut in the counts", model(start(3, 0, 0).substr(0, 20)), {"byte 16"}},
    {Refusal::gguf_frame, "more keys than bytes", model(start(3, 0, kHuge)), {"byte 24"}},
    {Refusal::gguf_frame, "more tensors than bytes", model(start(3, kHuge, 0)), {"byte 24"}},
    {Refusal::gguf_frame,
     "a text that ends beyond",
     model(start(3, 0, 1) + gguf_number(kHuge)),
     {"byte 32", "4611686018427387904 bytes where 0 are left"}},
    {Refusal::gguf_frame,
     "an array of more than a size can say",
     model(start(3, 0, 1) + gguf_key("a", 9, gguf_number<std::uint32_t>(10) + gguf_number(kHuge))),
     {"18446744073709551615 bytes"}},
    {Refusal::gguf_frame,
     "an array of texts that ends beyond",
     model(start(3, 0, 1) + gguf_key("a", 9, gguf_number<std::uint32_t>(8) + gguf_number(kHuge))),
     {"8 bytes where 0"}},
    {Refusal::gguf_type, "a value of no type", model({gguf_key("a", 13, "")}, {}), {"type 13"}},
    {Refusal::gguf_type,
     "an array of no type",
     model({gguf_key("a", 9, gguf_number<std::uint32_t>(13) + gguf_number<std::uint64_t>(0))}, {}),
     {"type 13 of a value"}},
    {Refusal::json_depth, "deep arrays", model({gguf_key("a", 9, nested(5))}, {}), {"5 arrays"}},
    {Refusal::json_utf8,
     "a text of other bytes",
     model({gguf_key("a", 8, gguf_text("\xff"))}, {}),
     {"byte 37"}},
    {Refusal::duplicate_key,
     "a key twice",
     model({gguf_key("a", 7, "x"), gguf_key("a", 7, "x")}, {}),
     {"'a'"}},
    {Refusal::duplicate_key,
     "a tensor twice",
     model({}, {{"t", {8}}, {"t", {8}, 0, 32}}, 64),
     {"'t'"}},
    {Refusal::gguf_alignment,
     "no power of two",
     model({gguf_key("general.alignment", 4, gguf_number(24u))}, {}),
     {"'24'"}},
    {Refusal::gguf_type, "a tensor of no type", model({}, {{"t", {8}, 4}}), {"'t'", "type 4"}},
    {Refusal::gguf_block,
     "a row of half a block",
     model({}, {{"t", {48, 2}, 8}}, 102),
     {"tensor 't'", "Q8_0 [2, 48] of blocks of 32"}},
    {Refusal::rank,
     "nine dimensions",
     model({}, {{"t", std::vector<std::uint64_t>(9, 1)}}, 4),
     {"tensor 't'", "got 9"}},
    {Refusal::shape_overflow,
     "a size of 64 bits",
     model({}, {{"t", {~std::uint64_t{0}}}}),
     {"18446744073709551615"}},
    {Refusal::shape_overflow, "too many bytes", model({}, {{"t", {kHuge}}}), {"'t'"}},
    {Refusal::shape_overflow, "too many elements", model({}, {{"t", {kHuge, kHuge}}}), {"'t'"}},
    {Refusal::beyond_file, "cut in the data", model({}, {{"t", {8}}}, 31), {"'t'", "32 bytes"}},
    {Refusal::overlap,
     "two at one place",
     model({}, {{"s", {8}}, {"t", {8}}}, 64),
     {"tensor 't'", "0 in the data for 32"}},
    {Refusal::gap,
     "a hole",
     model({}, {{"s", {8}}, {"t", {8}, 0, 64}}, 96),
     {"tensor 't'", "64 in the data for 32"}},
    {Refusal::gap, "an offset beyond", model({}, {{"t", {8}, 0, kHuge}}, 32), {"tensor 't'"}},
    {Refusal::trailing_bytes, "more data", model({}, {{"t", {8}}}, 33), {"1 bytes more"}},
    {Refusal::dialect_part,
     "blocks that are not read",
     model({}, {{"t", {256, 2}, 10}}, 168),
     {"tensor 't'", "Q2_K [2, 256]"}},
    {Refusal::dialect_part,
     "blocks of a vector",
     model({}, {{"t", {64}, 8}}, 68),
     {"tensor 't'", "Q8_0 [64] for two dimensions or more"}},
    {Refusal::dialect_part,
     "several numbers over scales",
     model({}, {{"a.weight", {64, 2}, 40}, {"a.scale", {2}, 0, 96}}, 104),
     {"tensor 'a.scale'", "for one F32"}},
    {Refusal::dialect_config,
     "a file of several",
     model({gguf_key("split.count", 2, gguf_number<std::uint16_t>(3))}, {}),
     {"split.count '3'"}},
    {Refusal::folder_ambiguous,
     "two models",
     [](const Scratch& s) {
       s.write("a.gguf", gguf({}, {}, ""));
       s.write("b.gguf", gguf({}, {}, ""));
     },
     {"'a.gguf', 'b.gguf'"}},
}};

}  // namespace
}  // namespace stowage::test
