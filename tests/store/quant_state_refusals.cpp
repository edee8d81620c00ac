// SPDX-License-Identifier: Apache-2.0
// Quant states that contradict themselves, their tensors or what we can hold.
#include <cstring>
#include <map>

#include "store/refusal_rows.h"
#include "stowage/storage.h"

namespace stowage::test {
namespace {

constexpr const char* kPlain =
    R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 32]})";
constexpr const char* kNested =
    R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 32],)"
    R"( "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5})";

struct Piece {
  std::string dtype, shape, bytes;
};
using Pieces = std::map<std::string, Piece>;

std::string nf4_table(float nudge = 0) {
  const auto values = trait(Codes::nf4).values;
  std::string bytes(values.size_bytes(), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  const float last = values.back() + nudge;
  std::memcpy(bytes.data() + bytes.size() - sizeof last, &last, sizeof last);
  return bytes;
}

Piece text(const std::string& json) {
  return {"U8", "[" + std::to_string(json.size()) + "]", json};
}
Piece zeros(const std::string& dtype, const std::string& shape, std::size_t bytes) {
  return {dtype, shape, std::string(bytes, '\0')};
}

// The tensors of a good weight w [4, 32], some of them replaced, some (without dtype) left out.
Make state(const std::string& json, const Pieces& other = {}) {
  Pieces pieces{{"w", zeros("U8", "[64,1]", 64)},
                {"w.absmax", zeros("F32", "[2]", 8)},
                {"w.quant_map", {"F32", "[16]", nf4_table()}},
                {"w.quant_state.bitsandbytes__nf4", text(json)}};
  for (const auto& [name, piece] : other) pieces[name] = piece;
  std::string entries, data;
  for (const auto& [name, piece] : pieces) {
    if (piece.dtype.empty()) continue;
    entries += (entries.empty() ? "{" : ",") + tensor(name, piece.dtype, piece.shape, data.size(),
                                                      data.size() + piece.bytes.size());
    data += piece.bytes;
  }
  return file(safetensors(entries + "}", data));
}
Make nested(const std::string& json, Pieces other = {}) {
  other.try_emplace("w.absmax", zeros("U8", "[2]", 2));
  other.try_emplace("w.nested_absmax", zeros("F32", "[1]", 4));
  other.try_emplace("w.nested_quant_map", zeros("F32", "[256]", 1024));
  return state(json, other);
}
// kPlain or kNested with one piece of text replaced.
std::string with(std::string json, std::string_view from, std::string_view to) {
  return json.replace(json.find(from), from.size(), to);
}

const std::string kStateName = "tensor 'w.quant_state.bitsandbytes__nf4'";

const Rows kStates{{
    {Refusal::quant_state_count,
     "two states",
     state(kPlain, {{"w.quant_state.bitsandbytes__fp4", text(kPlain)}}),
     {"another for 'w'"}},
    {Refusal::json_syntax, "a state that is no JSON", state("nf4"), {kStateName}},
    {Refusal::json_utf8, "a state in Latin-1", state("{\"\xe9\":1}"), {kStateName}},
    {Refusal::duplicate_key,
     "in the state",
     state(with(kPlain, "}", ", \"blocksize\": 64}")),
     {"'blocksize' again", kStateName}},
    {Refusal::unknown_key,
     "in the state",
     state(with(kPlain, "dtype", "d_type")),
     {"'d_type'", kStateName}},
    {Refusal::missing_key,
     "no quant_type",
     state(with(kPlain, "\"quant_type\": \"nf4\", ", "")),
     {"quant_type"}},
    {Refusal::missing_key,
     "no blocksize",
     state(with(kPlain, "\"blocksize\": 64, ", "")),
     {"blocksize"}},
    {Refusal::missing_key,
     "no state dtype",
     state(with(kPlain, "\"dtype\": \"bfloat16\", ", "")),
     {"dtype"}},
    {Refusal::missing_key,
     "no state shape",
     state(with(kPlain, ", \"shape\": [4, 32]", "")),
     {"shape"}},
    {Refusal::missing_key,
     "half nested",
     nested(with(kNested, ", \"nested_offset\": 0.5", "")),
     {"nested_offset"}},
    {Refusal::wrong_type,
     "a null shape",
     state(with(kPlain, "[4, 32]", "null")),
     {"'shape' that is not an array"}},
    {Refusal::wrong_type,
     "a blocksize in text",
     state(with(kPlain, "64", "\"64\"")),
     {"'blocksize'"}},
    {Refusal::wrong_type,
     "an offset in text",
     nested(with(kNested, "0.5", "\"0.5\"")),
     {"'nested_offset'"}},
    {Refusal::wrong_type,
     "an object in the state",
     state(with(kPlain, "64", "{}")),
     {"'blocksize'"}},
    {Refusal::wrong_type,
     "a list in the state's shape",
     state(with(kPlain, "[4,", "[[4],")),
     {"'shape.[]'"}},
    {Refusal::quant_state_value,
     "another type",
     state(with(kPlain, "nf4", "af4")),
     {"'af4'", kStateName}},
    {Refusal::quant_state_value,
     "an unknown dialect",
     state(with(kPlain, "\"nf4\"", "\"nf4:foo\"")),
     {"'nf4:foo'", kStateName}},
    {Refusal::quant_state_value,
     "an unknown dialect in the key",
     state("", {{"w.quant_state.bitsandbytes__nf4", {}},
                {"w.quant_state.bitsandbytes__nf4:foo", text(kPlain)}}),
     {"'w.quant_state.bitsandbytes__nf4:foo'"}},
    {Refusal::quant_state_value,
     "the type of another key",
     state(with(kPlain, "nf4", "fp4")),
     {"'fp4'", kStateName}},
    {Refusal::quant_state_value, "a block of 48", state(with(kPlain, "64", "48")), {"block48"}},
    {Refusal::quant_state_value,
     "a huge block",
     state(with(kPlain, "64", "18446744073709551615")),
     {kStateName}},
    {Refusal::quant_state_value,
     "an int8 dtype",
     state(with(kPlain, "bfloat16", "int8")),
     {"'int8'"}},
    {Refusal::quant_state_value,
     "nested blocks of 64",
     nested(with(kNested, "256", "64")),
     {"'nested_blocksize': 64"}},
    {Refusal::quant_state_value,
     "nested in fp16",
     nested(with(kNested, "float32", "float16")),
     {"'float16'"}},
    {Refusal::quant_state_value,
     "an offset beyond fp32",
     nested(with(kNested, "0.5", "1e39")),
     {"nested_offset"}},
    {Refusal::quant_state_value,
     "nine state dimensions",
     state(with(kPlain, "[4, 32]", "[1,1,1,1,1,1,1,4,32]")),
     {kStateName}},
    {Refusal::quant_state_value,
     "a state shape that overflows",
     state(with(kPlain, "[4, 32]", "[4611686018427387904, 32]")),
     {kStateName}},
    {Refusal::quant_state_part, "no codes", state(kPlain, {{"w", {}}}), {"no 'w'"}},
    {Refusal::quant_state_part,
     "codes too short",
     state(kPlain, {{"w", zeros("U8", "[63,1]", 63)}}),
     {"63 bytes for 64", "tensor 'w'"}},
    {Refusal::quant_state_part,
     "no absmax",
     state(kPlain, {{"w.absmax", {}}}),
     {"no 'w.absmax' (F32 [2])"}},
    {Refusal::quant_state_part,
     "absmax in bf16",
     state(kPlain, {{"w.absmax", zeros("BF16", "[2]", 4)}}),
     {"tensor 'w.absmax'", "BF16 [2] for F32 [2]"}},
    {Refusal::quant_state_part,
     "absmax too long",
     state(kPlain, {{"w.absmax", zeros("F32", "[3]", 12)}}),
     {"tensor 'w.absmax'"}},
    {Refusal::quant_state_part,
     "absmax not nested",
     nested(kNested, {{"w.absmax", zeros("F32", "[2]", 8)}}),
     {"F32 [2] for U8 [2]"}},
    {Refusal::quant_state_part,
     "no map",
     state(kPlain, {{"w.quant_map", {}}}),
     {"no 'w.quant_map'"}},
    {Refusal::quant_state_part,
     "no nested absmax",
     nested(kNested, {{"w.nested_absmax", {}}}),
     {"no 'w.nested_absmax'"}},
    {Refusal::quant_state_part,
     "a short nested map",
     nested(kNested, {{"w.nested_quant_map", zeros("F32", "[16]", 64)}}),
     {"tensor 'w.nested_quant_map'"}},
    {Refusal::quant_state_part,
     "nested tensors, plain state",
     nested(kPlain, {{"w.absmax", zeros("F32", "[2]", 8)}}),
     {"nested_absmax but no nested_offset"}},
    {Refusal::quant_state_part,
     "a state of floats",
     state(kPlain, {{"w.quant_state.bitsandbytes__nf4", zeros("F32", "[2]", 8)}}),
     {"F32 [2]"}},
    {Refusal::quant_state_part,
     "a state of a megabyte",
     state(kPlain, {{"w.quant_state.bitsandbytes__nf4", zeros("U8", "[1048576]", 1048576)}}),
     {"a short U8 text"}},
    {Refusal::quant_map,
     "another table",
     state(kPlain, {{"w.quant_map", {"F32", "[16]", nf4_table(0.001F)}}}),
     {"tensor 'w.quant_map'", "1.001 for 1"}},
    {Refusal::quant_map,
     "not a number",
     state(kPlain, {{"w.quant_map", {"F32", "[16]", std::string(64, '\xff')}}}),
     {"nan"}},
}};

}  // namespace
}  // namespace stowage::test
