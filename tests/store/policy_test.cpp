// SPDX-License-Identifier: Apache-2.0
#include "store/policy.h"

#include <vector>

#include "expect_error.h"

namespace stowage {
namespace {

const Storage kNf4 = parse_storage("nf4"), kInt8 = parse_storage("int8");
const Policy kDefaults{.rules = {}, .storage = kNf4};
const Policy kLinears{.rules = {}, .storage = kNf4, .linears_only = true};

std::string reason(const Policy& policy, std::string_view name, const Shape& shape) {
  const Choice choice = choose(policy, name, shape, true);
  return choice.storage ? "" : choice.reason;
}

TEST(Policy, DefaultsTakeTheWeightsOfABert) {
  for (const char* name :
       {"embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight",
        "encoder.layer.0.attention.self.query.weight", "encoder.layer.0.output.dense.weight",
        "pooler.dense.weight"})
    EXPECT_EQ(reason(kDefaults, name, {384, 384}), "") << name;
  EXPECT_EQ(reason(kDefaults, "embeddings.LayerNorm.weight", {384}), "fewer than two dimensions");
  EXPECT_EQ(reason(kDefaults, "encoder.layer.0.output.dense.bias", {384}),
            "fewer than two dimensions");
  EXPECT_FALSE(choose(kDefaults, "embeddings.position_ids", {1, 512}, false).storage);
}

TEST(Policy, DefaultsTakeTheWeightsOfALlamaButNotItsHead) {
  for (const char* name : {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
                           "model.layers.0.mlp.down_proj.weight"})
    EXPECT_EQ(reason(kDefaults, name, {64, 64}), "") << name;
  EXPECT_EQ(reason(kDefaults, "lm_head.weight", {64, 64}), "a head; name it in a rule to pack it");
  EXPECT_EQ(reason(kDefaults, "model.layers.0.input_layernorm.weight", {64}),
            "fewer than two dimensions");
}

TEST(Policy, DefaultsLookAtNamesAndRanks) {
  EXPECT_EQ(reason(kDefaults, "weight", {4, 4}), "");  // a root module is never a head
  EXPECT_EQ(reason(kDefaults, "conv.weight", {4, 4, 3, 3, 3}), "");
  EXPECT_EQ(reason(kDefaults, "conv.weight", {4, 4, 3, 3, 3, 3}), "more than five dimensions");
  EXPECT_EQ(reason(kDefaults, "experts.gate_up_proj", {4, 4, 4}), "not named weight");
  EXPECT_EQ(reason(kDefaults, "preweight", {4, 4}), "not named weight");
  EXPECT_EQ(reason(kDefaults, "AdaLayerNorm.weight", {4, 4}), "a norm");
}

TEST(Policy, HeadsAreKnownByTheLastPartOfTheirModule) {
  for (const char* name : {"classifier.weight", "bert.score.weight", "qa_outputs.weight",
                           "a.classification_head.weight", "lm_head.base_layer.weight",
                           "score.original_module.weight"})
    EXPECT_TRUE(is_head(name)) << name;
  for (const char* name : {"weight", "classifier.dense.weight", "lm_head_norm.weight",
                           "base_layer.weight", "my_score.weight"})
    EXPECT_FALSE(is_head(name)) << name;
}

TEST(Policy, RoutersAreKnownByNameAndFewRows) {
  for (const char* name : {"model.layers.0.mlp.gate.weight", "block.router.weight",
                           "mlp.shared_expert_gate.weight", "mlp.gate.base_layer.weight"}) {
    EXPECT_EQ(reason(kDefaults, name, {16, 64}), "a router; name it in a rule to pack it") << name;
    EXPECT_EQ(reason(kDefaults, name, {17, 64}), "") << name;
  }
  EXPECT_EQ(reason(kDefaults, "mlp.gate_proj.weight", {16, 64}), "");
  EXPECT_EQ(reason(kDefaults, "router.dense.weight", {16, 64}), "");
  Policy named = kDefaults;
  named.rules.push_back(parse_rule("*.gate=nf4"));
  EXPECT_TRUE(choose(named, "mlp.gate.weight", {16, 64}, true).storage);
}

TEST(Policy, EmbeddingsAreKnownByName) {
  for (const char* name : {"model.embed_tokens.weight", "transformer.wte.weight", "wpe.weight",
                           "shared.weight", "tok_embeddings.weight", "Emb.weight"})
    EXPECT_TRUE(is_embedding(name)) << name;
  for (const char* name : {"embeddings.dense.weight", "weight", "shared.dense.weight"})
    EXPECT_FALSE(is_embedding(name)) << name;
}

TEST(Policy, ForBitsandbytesOnlyMatricesThatAreNoEmbedding) {
  EXPECT_EQ(reason(kLinears, "model.layers.0.mlp.down_proj.weight", {64, 64}), "");
  EXPECT_EQ(reason(kLinears, "model.embed_tokens.weight", {64, 64}), "an embedding");
  EXPECT_EQ(reason(kLinears, "conv.weight", {4, 4, 3}), "not a matrix");
}

TEST(Policy, TheFirstRuleThatMatchesDecides) {
  const Policy policy{.rules = {parse_rule("*.mlp.*=int8"), parse_rule("lm_head=nf4:nested"),
                                parse_rule("*.layers.1.*=plain")},
                      .storage = kNf4};
  EXPECT_EQ(choose(policy, "m.layers.1.mlp.up.weight", {8, 8}, true).storage, kInt8);
  EXPECT_EQ(choose(policy, "m.layers.0.attn.weight", {8, 8}, true).storage, kNf4);
  EXPECT_EQ(choose(policy, "lm_head.weight", {8, 8}, true).storage, parse_storage("nf4:nested"));
  EXPECT_EQ(reason(policy, "m.layers.1.attn.weight", {8, 8}), "rule '*.layers.1.*' keeps it plain");
  EXPECT_EQ(reason(policy, "m.mlp.up.bias", {8}), "fewer than two dimensions");
}

TEST(Policy, WithoutAStorageOnlyRulesTake) {
  const Policy policy{.rules = {parse_rule("a.*=nf4")}, .storage = std::nullopt};
  EXPECT_TRUE(choose(policy, "a.weight", {8, 8}, true).storage);
  EXPECT_EQ(reason(policy, "b.weight", {8, 8}), "no rule names it");
}

TEST(Policy, GlobsMatchTheNameOrAModuleThatContainsItByCase) {
  const std::string glob = "model.[ab].lin?";
  EXPECT_TRUE(matches(glob, "model.a.lin1.weight"));
  EXPECT_TRUE(matches(glob, "model.a.lin1.inner.weight"));
  EXPECT_FALSE(matches(glob, "model.c.lin1.weight"));
  EXPECT_FALSE(matches(glob, "Model.a.lin1.weight"));
  EXPECT_TRUE(matches("*.weight", "a.weight"));
  EXPECT_TRUE(matches("a", "a.b.c.weight"));
  EXPECT_FALSE(matches("a", "weight"));
  EXPECT_FALSE(matches("b", "a.b.c.weight"));
}

TEST(Policy, WhatIsSkippedStaysPlainWhateverARuleSays) {
  const Policy policy{.skips = {"*.attn"}, .rules = {parse_rule("*.attn.*=int8")}, .storage = kNf4};
  EXPECT_EQ(reason(policy, "m.attn.q.weight", {8, 8}), "skip '*.attn' keeps it plain");
  EXPECT_EQ(choose(policy, "m.mlp.weight", {8, 8}, true).storage, kNf4);
}

TEST(Policy, RefusesRulesThatSayNothing) {
  for (const char* text : {"", "nf4", "=nf4"})
    EXPECT_STOWAGE_ERROR(parse_rule(text), invalid_argument, "rule: must be GLOB=STORAGE");
  EXPECT_STOWAGE_ERROR(parse_rule("*=nf5"), invalid_argument, "must be one of f32");
  EXPECT_EQ(parse_rule("a=b=plain").glob, "a=b");
}

}  // namespace
}  // namespace stowage
