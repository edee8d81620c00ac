// SPDX-License-Identifier: Apache-2.0
// Bad indexes, shards that do not fit them, folders that hold no model or two.
#include "store/refusal_rows.h"

namespace stowage::test {
namespace {

std::string index_of(const std::string& map) { return "{\"weight_map\":{" + map + "}}"; }
Make shards(std::string index) {
  return [index = std::move(index)](const Scratch& s) {
    s.write("model.safetensors.index.json", index);
    s.write("1.safetensors", small_file());
    s.write("2.safetensors", safetensors("{" + tensor("b", "U8", "[1]", 0, 1) + "}", "x"));
    s.write("3.safetensors", small_file());
    s.write("set.safetensors",
            safetensors(
                "{\"__metadata__\":{\"stowage\":\"{\\\"version\\\":1,\\\"set\\\":\\\"new\\\"}\"}," +
                    tensor("b", "U8", "[1]", 0, 1) + "}",
                "x"));
  };
}

const Rows kShards{{
    {Refusal::shard_name,
     "upwards",
     shards(index_of("\"a\":\"../1.safetensors\"")),
     {"tensor 'a'", "'../1.safetensors'"}},
    {Refusal::shard_name,
     "upwards later",
     shards(index_of("\"a\":\"x/../../1\"")),
     {"'x/../../1'"}},
    {Refusal::shard_name, "absolute", shards(index_of("\"a\":\"/etc/passwd\"")), {"'/etc/passwd'"}},
    {Refusal::shard_name, "the folder itself", shards(index_of("\"a\":\".\"")), {"'.'"}},
    {Refusal::shard_name, "empty", shards(index_of("\"a\":\"\"")), {"tensor 'a'"}},
    {Refusal::shard_name,
     "a zero byte",
     shards(index_of("\"a\":\"1.safetensors\\u0000\"")),
     {"\\x00"}},
    {Refusal::shard_name, "a back slash", shards(index_of("\"a\":\"..\\\\1\"")), {"tensor 'a'"}},
    {Refusal::shard_missing,
     "not there",
     shards(index_of("\"a\":\"9.safetensors\"")),
     {"9.safetensors", "No such file"}},
    {Refusal::not_in_shard,
     "a tensor of nobody",
     shards(index_of("\"a\":\"1.safetensors\",\"c\":\"1.safetensors\"")),
     {"tensor 'c'", "'1.safetensors'"}},
    {Refusal::not_in_index,
     "a tensor it omits",
     shards(index_of("\"a\":\"1.safetensors\",\"c\":\"2.safetensors\"")),
     {"tensor 'b'", "2.safetensors"}},
    {Refusal::not_in_index,
     "the wrong shard",
     shards(index_of("\"a\":\"2.safetensors\",\"b\":\"1.safetensors\"")),
     {"tensor 'a'"}},
    {Refusal::duplicate_tensor,
     "in two shards",
     shards(index_of("\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"c\":\"3.safetensors\"")),
     {"tensor 'a'", "3.safetensors", "byte 61"}},
    {Refusal::mixed_shards,
     "two writings",
     shards(index_of("\"a\":\"1.safetensors\",\"b\":\"set.safetensors\"")),
     {"set.safetensors", "'new' for ''"}},
    {Refusal::mixed_shards,
     "an older index",
     shards("{\"metadata\":{\"stowage_set\":\"old\"},\"weight_map\":{\"b\":\"set.safetensors\"}}"),
     {"'new' for 'old'"}},
    {Refusal::missing_key, "no map", shards("{\"metadata\":{}}"), {"weight_map"}},
    {Refusal::missing_key, "an empty map", shards(index_of("")), {"no shard"}},
    {Refusal::unknown_key, "in the index", shards("{\"weights\":{}}"), {"'weights'"}},
    {Refusal::wrong_type, "a map of numbers", shards(index_of("\"a\":1")), {"'weight_map.a'"}},
    {Refusal::wrong_type, "a map that is a list", shards("{\"weight_map\":[]}"), {"not an object"}},
    {Refusal::duplicate_key,
     "in the map",
     shards(index_of("\"a\":\"1.safetensors\",\"a\":\"1.safetensors\"")),
     {"'a' again"}},
    {Refusal::json_syntax, "an index that is no JSON", shards("weights"), {"byte 1"}},
    {Refusal::folder_empty, "nothing", [](const Scratch& s) { s.write("model.bin", ""); }, {}},
    {Refusal::folder_empty,
     "only a temporary file",
     [](const Scratch& s) { s.write(".m.safetensors", small_file()); },
     {}},
    {Refusal::index_missing,
     "one shard of two",
     [](const Scratch& s) { s.write("model-00001-of-00002.safetensors", small_file()); },
     {"'model-00001-of-00002.safetensors'"}},
    {Refusal::folder_ambiguous,
     "two files",
     [](const Scratch& s) {
       s.write("a.safetensors", small_file()), s.write("b.safetensors", small_file());
     },
     {"'a.safetensors', 'b.safetensors'"}},
    {Refusal::folder_ambiguous,
     "both forms",
     [](const Scratch& s) {
       s.write("model.safetensors", small_file()), s.write("model.safetensors.index.json", "{}");
     },
     {"'model.safetensors.index.json', 'model.safetensors'"}},
    {Refusal::folder_ambiguous,
     "two indexes",
     [](const Scratch& s) {
       s.write("a.safetensors.index.json", "{}"), s.write("b.safetensors.index.json", "{}");
     },
     {"'a.safetensors.index.json', 'b"}},
}};

}  // namespace
}  // namespace stowage::test
