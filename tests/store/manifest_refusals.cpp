// SPDX-License-Identifier: Apache-2.0
// Manifests that no writer of ours made.
#include "store/refusal_rows.h"

namespace stowage::test {
namespace {

// A file with one I8 tensor w [2, 4] and its scale, and a manifest of these fields.
std::string escaped(const std::string& json) {
  std::string text;
  for (const char c : json) text += c == '"' ? std::string("\\\"") : std::string(1, c);
  return text;
}
Make manifest(const std::string& fields) {
  return header("{\"__metadata__\":{\"stowage\":\"" + escaped("{" + fields + "}") + "\"}," +
                    tensor("w_scale", "F32", "[2,1]", 0, 8) + "," +
                    tensor("w", "I8", "[2,4]", 8, 16) + "}",
                16);
}
Make manifest_weight(const std::string& fields) {
  return manifest("\"version\":1,\"weights\":{\"w\":{" + fields + "}}");
}

const Rows kManifest{{
    {Refusal::manifest_part,
     "a column in a group that is not there",
     header(R"({"__metadata__":{"stowage":"{\"version\":1,\"weights\":{\"w\":{\"storage\":)"
            R"(\"int8:block2:actorder\",\"shape\":[2,4]}}}"},)" +
                tensor("w_g_idx", "I32", "[4]", 0, 16) + "," +
                tensor("w_scale", "F32", "[2,2]", 16, 32) + "," +
                tensor("w", "I8", "[2,4]", 32, 40) + "}",
            40),
     {"tensor 'w_g_idx'", "of column 0, of 2 groups"}},
    {Refusal::manifest_version,
     "from the future",
     manifest("\"version\":2"),
     {"got 2", "metadata 'stowage'"}},
    {Refusal::missing_key, "no version", manifest("\"weights\":{}"), {"'version'"}},
    {Refusal::missing_key,
     "no storage",
     manifest_weight("\"shape\":[2,4]"),
     {"tensor 'w'", "'storage'"}},
    {Refusal::missing_key,
     "no shape in the manifest",
     manifest_weight("\"storage\":\"int8\""),
     {"'shape'"}},
    {Refusal::unknown_key,
     "in the manifest",
     manifest("\"version\":1,\"author\":\"x\""),
     {"'author'"}},
    {Refusal::unknown_key,
     "an object in the manifest",
     manifest("\"version\":1,\"author\":{}"),
     {"'author'"}},
    {Refusal::unknown_key,
     "in a weight",
     manifest_weight("\"dtype\":\"x\""),
     {"'weights.w.dtype'"}},
    {Refusal::wrong_type, "version", manifest("\"version\":\"1\""), {"'version'"}},
    {Refusal::wrong_type,
     "a list of weights",
     manifest("\"version\":1,\"weights\":[]"),
     {"not an object"}},
    {Refusal::wrong_type,
     "a bare weight",
     manifest("\"version\":1,\"weights\":{\"w\":1}"),
     {"not an object"}},
    {Refusal::wrong_type,
     "weights as text",
     manifest("\"version\":1,\"weights\":\"w\""),
     {"not an object"}},
    {Refusal::wrong_type,
     "checksums as text",
     manifest("\"version\":1,\"xxh3\":\"w\""),
     {"not an object"}},
    {Refusal::wrong_type,
     "nested checksums",
     manifest("\"version\":1,\"xxh3\":{\"w\":{}}"),
     {"not a bare value"}},
    {Refusal::wrong_type, "version as an object", manifest("\"version\":{}"), {"not a bare value"}},
    {Refusal::wrong_type,
     "a storage object",
     manifest_weight("\"storage\":{}"),
     {"not a bare value"}},
    {Refusal::wrong_type, "a bare shape", manifest_weight("\"shape\":1"), {"not an array"}},
    {Refusal::wrong_type,
     "a list in the manifest's shape",
     manifest_weight("\"shape\":[[1]]"),
     {"not"}},
    {Refusal::manifest_value,
     "a storage that is none",
     manifest_weight("\"storage\":\"int9\",\"shape\":[2,4]"),
     {"tensor 'w'", "int9"}},
    {Refusal::manifest_value,
     "an unknown dialect",
     manifest_weight("\"storage\":\"nf4:foo\",\"shape\":[2,4]"),
     {"tensor 'w'", "storage 'nf4:foo'"}},
    {Refusal::manifest_value,
     "an unknown dtype of a dialect",
     manifest_weight("\"storage\":\"nf4:torchao:bf8\",\"shape\":[128,128]"),
     {"tensor 'w'", "storage 'nf4:torchao:bf8'"}},
    {Refusal::manifest_value,
     "a dialect of other codes",
     manifest_weight("\"storage\":\"int8:torchao\",\"shape\":[128,128]"),
     {"tensor 'w'", "storage 'int8:torchao'"}},
    {Refusal::manifest_value,
     "a compute dtype",
     manifest_weight("\"compute\":\"f8\""),
     {"compute 'f8'"}},
    {Refusal::manifest_value,
     "a shape that overflows",
     manifest_weight("\"storage\":\"int8\",\"shape\":[9223372036854775807,9]"),
     {"tensor 'w'"}},
    {Refusal::manifest_value,
     "a shape too long",
     manifest_weight("\"shape\":[1,1,1,1,1,1,1,1,1]"),
     {"tensor 'w'"}},
    {Refusal::manifest_value,
     "a storage that cannot hold the shape",
     manifest_weight("\"storage\":\"int8:row\",\"shape\":[]"),
     {"tensor 'w'"}},
    {Refusal::manifest_value,
     "a checksum",
     manifest("\"version\":1,\"xxh3\":{\"w\":\"12\"}"),
     {"tensor 'w'", "'12'"}},
    {Refusal::manifest_part,
     "another storage",
     manifest_weight("\"storage\":\"f8_e4m3:row\",\"shape\":[2,4]"),
     {"tensor 'w'", "'w' I8 [2, 4] for F8_E4M3 [2, 4]"}},
    {Refusal::manifest_part,
     "another scale",
     manifest_weight("\"storage\":\"int8:block2\",\"shape\":[2,4]"),
     {"'w_scale' F32 [2, 1] for F32 [2, 2]"}},
    {Refusal::manifest_part,
     "another shape",
     manifest_weight("\"storage\":\"int8\",\"shape\":[4,2]"),
     {"tensor 'w'"}},
    {Refusal::manifest_part,
     "a missing weight",
     manifest("\"version\":1,\"weights\":{\"v\":{\"storage\":\"f32\",\"shape\":[1]}}"),
     {"tensor 'v'", "no such tensor"}},
    {Refusal::json_syntax,
     "a manifest that is no JSON",
     header("{\"__metadata__\":{\"stowage\":\"1\"}}"),
     {"metadata 'stowage'"}},
}};

}  // namespace
}  // namespace stowage::test
