// SPDX-License-Identifier: Apache-2.0
// Plans of mixtures: which weights are of one expert, how often a pass uses it, and what that makes
// of the time and of the hits.
#include "plan/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "expect_error.h"
#include "plan/planned.h"

namespace stowage {
namespace {

using test::made_links;
using testing::HasSubstr;
using testing::Not;

constexpr std::uint64_t kMiB = 1 << 20;
using test::kInner;
using test::kWidth;

using test::layer_name;
using test::mixture;
using test::mixture_of_stacks;

TEST(PlanExperts, AreKnownByTheirNames) {
  struct Known {
    const char *name, *of, *layer;
    int index;
    bool apart;
  };
  for (const Known& known :
       {Known{"model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.3.mlp.experts",
              "model.layers.3", 17, true},
        {"model.layers.3.block_sparse_moe.experts.1.w1.weight",
         "model.layers.3.block_sparse_moe.experts", "model.layers.3", 1, true},
        {"decoder.block.2.layer.1.mlp.experts.expert_4.wi.weight",
         "decoder.block.2.layer.1.mlp.experts", "decoder.block.2.layer.1", 4, true},
        {"model.layers.3.mlp.experts.gate_up_proj[5]", "model.layers.3.mlp.experts",
         "model.layers.3", 5, false},
        {"blk.4.ffn_gate_exps.weight[7]", "blk.4", "blk.4", 7, false},
        {"w[0]", "", "", 0, false}}) {
    const auto found = planning::expert_of(known.name);
    ASSERT_TRUE(found) << known.name;
    EXPECT_EQ(found->of, known.of);
    EXPECT_EQ(found->layer, known.layer);
    EXPECT_EQ(found->index, known.index);
    EXPECT_EQ(found->apart, known.apart) << known.name;
  }
  for (const char* other :
       {"model.layers.3.mlp.shared_experts.up_proj.weight", "model.layers.3.mlp.gate.weight", "",
        "experts", "experts.", "experts.x.w", "layers.3.weight", "w[]", "w[x]", "w[3", "[-1]",
        "experts.99999999999999999999.w", "experts.65536.w", "w[65536]"})
    EXPECT_FALSE(planning::expert_of(other)) << other;
}

TEST(PlanExperts, OfStacksAreUnitsOfTheirOwn) {
  const Plan plan =
      make_plan("m", mixture_of_stacks(2, 8), {.ram = 64 * kMiB, .routed = 2}, made_links());
  EXPECT_EQ(plan.units.size(), 2u * (1 + 2 * 8));
  std::uint64_t bytes = 0;
  for (const PlanUnit& unit : plan.units) bytes += unit.rest;
  EXPECT_EQ(bytes, 2u * 2 * (kWidth * kWidth + 8 * 3 * kInner * kWidth));
  EXPECT_EQ(plan.units[0].name, "model.layers.0.mlp.experts.down_proj[0]");
  EXPECT_EQ(plan.units[1].name, "model.layers.0.mlp.experts.gate_up_proj[0]");
  // Neither where they are too small, nor where their scales are shared, nor where an accelerator
  // has room for all.
  std::vector<PlanUnit> small = {test::unit("experts.w", {8, 32, 32})};
  small[0].stack = true;
  EXPECT_EQ(make_plan("m", small, {.ram = kMiB}, made_links()).units.size(), 1u);
  std::vector<PlanUnit> shared = {test::unit("experts.w", {8, 3, 64 * 100}, "nf4:block64:nested")};
  shared[0].stack = true;
  EXPECT_EQ(make_plan("m", shared, {.ram = kMiB}, made_links()).units.size(), 1u);
  const PlanOptions there{.ram = 64 * kMiB, .accelerators = {{"cuda:0", 64 * kMiB}}};
  EXPECT_EQ(make_plan("m", mixture_of_stacks(2, 8), there, made_links()).units.size(), 6u);
}

// A device fetches of a stack what tokens are routed to, and keeps what they are routed to most.
TEST(PlanExperts, OnAnAcceleratorMatricesHavePlacesOfTheirOwn) {
  for (const std::int64_t rows : {1, 512}) {
    PlanOptions options{.ram = 64 * kMiB, .accelerators = {{"cuda:0", 5 * kMiB}}, .rows = rows};
    const Plan whole = make_plan("m", mixture_of_stacks(2, 16), options, made_links());
    options.config = R"({"num_experts_per_tok": 2})";
    const Plan plan = make_plan("m", mixture_of_stacks(2, 16), options, made_links());
    EXPECT_LE(plan.seconds, (rows == 1 ? 0.5 : 1) * whole.seconds);
    EXPECT_LE(plan.peak.at("cuda:0"), 5 * kMiB);
    EXPECT_LE(plan.peak.at("ram"), 64 * kMiB);
    for (const PlanUnit& unit : plan.units) {
      if (unit.shape.rank() != 3) continue;
      EXPECT_NEAR(unit.uses, 1 - std::pow(1 - 2.0 / 16, rows), 1e-12);
      EXPECT_NEAR(unit.uses * unit.share, 2.0 / 16, 1e-12);
    }
    check_plan(plan, "m", mixture_of_stacks(2, 16));
    EXPECT_THROW(check_plan(plan, "m", mixture_of_stacks(2, 17)), Error);
  }
  PlanOptions uneven{.ram = 64 * kMiB, .accelerators = {{"cuda:0", 5 * kMiB}}, .routed = 2};
  const Plan alike = make_plan("m", mixture_of_stacks(2, 16), uneven, made_links());
  std::vector<double> counts(16, 1);
  counts[3] = counts[11] = 1000;
  uneven.routing["model.layers.0"] = uneven.routing["model.layers.1"] = counts;
  const Plan plan = make_plan("m", mixture_of_stacks(2, 16), uneven, made_links());
  EXPECT_LT(plan.seconds, alike.seconds);
  const std::vector<PlanExperts> layers = experts_of(plan);
  ASSERT_EQ(layers.size(), 2u);
  for (const PlanExperts& layer : layers)
    for (std::size_t e = 0; e < 16; ++e)
      if (e == 3 || e == 11) {
        EXPECT_EQ(layer.experts[e].tier, "cuda:0") << layer.name << " " << e;
      }
}

TEST(PlanExperts, MatricesOfAStackWorkInOnePlace) {
  for (const bool works_on_cpu : {false, true})
    for (const std::uint64_t room : {4u, 6u, 12u, 30u}) {
      PlanOptions options{.ram = 20 * kMiB,
                          .accelerators = {{"cuda:0", room * kMiB}, {"cuda:1", room * kMiB}},
                          .rows = 4,
                          .works_on_cpu = works_on_cpu,
                          .routed = 2};
      const Plan plan = make_plan("m", mixture_of_stacks(3, 16), options, made_links());
      std::map<std::string, std::set<std::string>> work;
      bool slices = false;
      for (const PlanUnit& unit : plan.units)
        if (planning::is_slice(unit.name)) {
          slices = true;
          work[planning::expert_of(unit.name)->of].insert(unit.work);
          EXPECT_NE(unit.work, "cpu") << unit.name;
        }
      for (const auto& [of, places] : work) EXPECT_EQ(places.size(), 1u) << of << " " << room;
      EXPECT_EQ(slices, !work.empty());
      for (const auto& [tier, bytes] : plan.peak)
        EXPECT_LE(bytes, tier == "ram" ? 20 * kMiB : room * kMiB) << tier;
    }
}

// What stays there came through RAM, which has room for one though nothing rests on the disk.
TEST(PlanExperts, MatricesThatStayOnAnAcceleratorCameThroughRam) {
  PlanOptions options{
      .ram = 64 * kMiB, .accelerators = {{"cuda:0", 8 * kMiB}}, .works_on_cpu = false, .routed = 2};
  const Plan plan = make_plan("m", mixture_of_stacks(2, 16), options, made_links());
  std::uint64_t largest = 0;
  std::set<std::string> tiers;
  for (const PlanUnit& unit : plan.units)
    if (planning::is_slice(unit.name)) {
      largest = std::max(largest, unit.bytes);
      tiers.insert(unit.tier);
    }
  EXPECT_EQ(tiers, (std::set<std::string>{"cuda:0", "ram"}));
  EXPECT_GE(plan.ring.at("ram"), largest);
}

// Of experts that are spread over processes each plans its own, by their numbers among all.
TEST(PlanExperts, APartOfAStackIsAPartOfItsUses) {
  std::vector<double> counts(16, 1);
  counts[2] = counts[13] = 100;
  PlanOptions options{.ram = 64 * kMiB, .routed = 2};
  options.routing["model.layers.0"] = options.routing["model.layers.1"] = counts;
  const Plan whole = make_plan("m", mixture_of_stacks(2, 16), options, made_links());
  std::map<std::string, double> uses;
  for (const PlanUnit& unit : whole.units) uses[unit.name] = unit.uses;
  for (const std::int64_t each : {4, 1}) {
    std::vector<PlanUnit> units = mixture_of_stacks(2, static_cast<int>(each));
    for (PlanUnit& unit : units)
      if (unit.stack) unit.first = 12, unit.total = 16;
    const Plan part = make_plan("m", units, options, made_links());
    std::size_t experts = 0;
    for (const PlanUnit& unit : part.units) {
      if (unit.shape.rank() != 3) continue;
      ++experts;
      const auto index = planning::expert_of(unit.name)->index;
      EXPECT_GE(index, 12);
      EXPECT_LT(index, 12 + each);
      EXPECT_EQ(unit.uses, uses.at(unit.name)) << unit.name;
    }
    EXPECT_EQ(experts, static_cast<std::size_t>(2 * 2 * each));
    check_plan(part, "m", units);
    EXPECT_EQ(part.scratch, 0u);
    for (PlanUnit& unit : units) unit.index_scratch = unit.stack ? 5000 : 0;
    const Plan in_pieces = make_plan("m", units, options, made_links());
    EXPECT_GE(in_pieces.scratch, 5000u);
    EXPECT_EQ(in_pieces.units.size(), part.units.size());
    units.back().first = 3;
    EXPECT_THROW(check_plan(part, "m", units), Error) << "other experts";
  }
}

// What is spread over processes otherwise is in memory in each of them, and counts.
TEST(PlanExperts, WhatIsSpreadOtherwiseStays) {
  std::vector<PlanUnit> units = mixture_of_stacks(2, 16);
  std::uint64_t staying = 0;
  for (PlanUnit& unit : units)
    if (!unit.stack) unit.stays = true, staying += (unit.rest + 4095) / 4096 * 4096;
  ASSERT_GT(staying, 0u);
  const auto planned = [&](std::uint64_t ram) {
    return make_plan("m", units, {.ram = ram, .routed = 2}, made_links());
  };
  const Plan all = planned(64 * kMiB);
  const Plan plan = planned(all.peak.at("ram") - 2 * kMiB);
  bool named = false, on_disk = false;
  for (const PlanUnit& unit : plan.units) {
    on_disk |= unit.tier == "disk";
    if (planning::is_slice(unit.name)) {
      EXPECT_FALSE(unit.stays) << unit.name;
      continue;
    }
    EXPECT_TRUE(unit.stays && unit.tier == "ram") << unit.name;
    named |= unit.why == "spread over processes: stays in memory";
  }
  EXPECT_TRUE(named && on_disk);
  EXPECT_GE(plan.peak.at("ram"), staying);
  EXPECT_THROW((void)planned(staying), Error);
  check_plan(plan, "m", units);
  const Plan again = plan_from_json(to_json(plan));
  for (std::size_t i = 0; i < plan.units.size(); ++i)
    EXPECT_EQ(again.units[i].stays, plan.units[i].stays);
}

// Where the link is slow and the CPU is not, experts work where they rest, as a whole.
TEST(PlanExperts, StacksMayWorkOnTheCpu) {
  Links links = made_links();
  links.accelerators["cuda:0"].copy = 1e6;
  const Plan plan =
      make_plan("m", mixture_of_stacks(2, 16),
                {.ram = 64 * kMiB, .accelerators = {{"cuda:0", 5 * kMiB}}, .routed = 2}, links);
  for (const PlanUnit& unit : plan.units) EXPECT_FALSE(planning::is_slice(unit.name)) << unit.name;
  check_plan(plan, "m", mixture_of_stacks(2, 16));
}

TEST(PlanExperts, MatricesOfOneGetOnePlace) {
  for (const auto& units :
       {mixture(3, 16), mixture_of_stacks(3, 16), mixture_of_stacks(3, 16, "nf4")}) {
    std::set<std::string> tiers_seen;
    for (const std::uint64_t ram : {9u, 14u, 20u, 30u}) {
      const Plan plan = make_plan("m", units, {.ram = ram * kMiB, .routed = 2}, made_links());
      EXPECT_LE(plan.peak.at("ram"), ram * kMiB);
      std::map<std::string, std::set<std::string>> tiers;
      for (const PlanUnit& unit : plan.units)
        if (const auto expert = planning::expert_of(unit.name)) {
          tiers[expert->of + std::to_string(expert->index)].insert(unit.tier);
          tiers_seen.insert(unit.tier);
        }
      EXPECT_EQ(tiers.size(), 48u);
      for (const auto& [of, places] : tiers) EXPECT_EQ(places.size(), 1u) << of;
    }
    EXPECT_EQ(tiers_seen.size(), 2u) << "some stayed and some did not";
  }
}

TEST(PlanExperts, UsesAreThoseOfAPassAndRowsThoseThatMeetThem) {
  for (const std::int64_t rows : {1, 7, 512}) {
    const Plan plan =
        make_plan("m", mixture(1, 16), {.ram = 64 * kMiB, .rows = rows, .routed = 2}, made_links());
    for (const PlanUnit& unit : plan.units) {
      if (!is_of_expert(unit.name)) continue;
      EXPECT_NEAR(unit.uses, 1 - std::pow(1 - 2.0 / 16, rows), 1e-12);
      EXPECT_NEAR(unit.uses * unit.share, 2.0 / 16, 1e-12) << "a token meets two of sixteen";
    }
  }
  // Many rows: as much work as a dense layer has that each row meets at an eighth of its width.
  const auto work = [](const Plan& plan) {
    double seconds = 0;
    for (const PlanUnit& unit : plan.units)
      if (is_of_expert(unit.name)) seconds += unit.seconds;
    return seconds;
  };
  const PlanOptions many{.ram = 64 * kMiB, .rows = 4096, .routed = 2};
  PlanOptions every = many;
  every.routed = 16;
  EXPECT_NEAR(work(make_plan("m", mixture(1, 16), many, made_links())) * 8,
              work(make_plan("m", mixture(1, 16), every, made_links())), 1e-9);
}

TEST(PlanExperts, AreAllUsedWhereNothingSaysHowMany) {
  const Plan plan = make_plan("m", mixture(1, 4), {.ram = 64 * kMiB}, made_links());
  for (const PlanUnit& unit : plan.units) EXPECT_EQ(unit.uses, 1);
}

TEST(PlanExperts, ConfigsSayHowManyATokenTakes) {
  EXPECT_EQ(planning::routed_in(R"({"num_experts_per_tok": 8})"), 8);
  EXPECT_EQ(planning::routed_in(R"({"a": 1, "text_config": {"experts_per_token": 4}})"), 4);
  EXPECT_EQ(planning::routed_in(R"({"num_experts_per_tok": null, "ffn_config": {"moe_top_k": 2}})"),
            2);
  EXPECT_EQ(planning::routed_in(R"({"num_experts": 8, "top_k": 50})"), 0);
  EXPECT_THROW(planning::routed_in("{"), Error);
  const test::Scratch scratch;
  const std::string path = test::write_headers(scratch, mixture(1, 16));
  scratch.write("config.json", R"({"num_experts_per_tok": 4})");
  const Plan plan = make_plan(File::open(path), {.ram = 64 * kMiB}, made_links());
  EXPECT_EQ(plan.units[1].uses, 0.25);
  scratch.write("config.json", "no json");
  EXPECT_THROW(make_plan(File::open(path), {.ram = 64 * kMiB}, made_links()), Error);
  // Who asks for no expert needs none.
  const test::Scratch dense;
  const std::string other = test::write_headers(dense, test::language_model(1, 64, 64));
  dense.write("config.json", "no json");
  EXPECT_GT(make_plan(File::open(other), {.ram = 64 * kMiB}, made_links()).units.size(), 1u);
}

TEST(PlanExperts, ThoseStayThatWereUsedMost) {
  PlanOptions options{.ram = 9 * kMiB, .routed = 2};
  std::vector<double> counts(16, 10);
  for (const std::size_t hot : {3u, 4u, 11u}) counts[hot] = 1000;
  options.routing[layer_name(1)] = counts;
  const Plan plan = make_plan("m", mixture(2, 16), options, made_links());
  const std::vector<PlanExperts> layers = experts_of(plan);
  ASSERT_EQ(layers.size(), 2u);
  double hits = 0, uses = 0;
  for (std::size_t layer = 0; layer < 2; ++layer) {
    double sum = 0;
    for (std::size_t e = 0; e < 16; ++e) {
      const PlanExpert& expert = layers[layer].experts[e];
      EXPECT_EQ(expert.bytes, 3 * (2 * kInner * kWidth + 4096u));
      sum += expert.uses;
      uses += expert.uses;
      if (expert.tier == "ram") hits += expert.uses;
      if (layer == 1 && (e == 3 || e == 4 || e == 11)) {
        EXPECT_EQ(expert.tier, "ram") << e;
      }
    }
    EXPECT_NEAR(sum, 2, 1e-9) << "a token takes two";
  }
  EXPECT_NEAR(*hits_of(plan), hits / uses, 1e-12);
  EXPECT_GT(*hits_of(plan), 0.5);
  const Plan alike = make_plan("m", mixture(2, 16), {.ram = 9 * kMiB, .routed = 2}, made_links());
  EXPECT_LT(*hits_of(alike), *hits_of(plan));
  EXPECT_LT(plan.seconds, alike.seconds);
}

TEST(PlanExperts, WhatWasUsedIsFoundByTheLayersNumberToo) {
  PlanOptions options{.ram = 9 * kMiB, .routed = 2};
  std::vector<double> counts(16, 0);
  counts[7] = 1;
  options.routing["language_model.layers.1"] = counts;
  const Plan plan = make_plan("m", mixture(2, 16), options, made_links());
  EXPECT_GT(experts_of(plan)[1].experts[7].uses, experts_of(plan)[1].experts[6].uses);
  EXPECT_EQ(experts_of(plan)[0].experts[7].uses, experts_of(plan)[0].experts[6].uses);
}

TEST(PlanExperts, OfAListThoseThatNobodyUsedNeedNotBeSaid) {
  PlanOptions options{.ram = 9 * kMiB, .routed = 2};
  options.routing[layer_name(0)] = {0, 9, 3};
  const Plan some = make_plan("m", mixture(2, 16), options, made_links());
  options.routing[layer_name(0)].resize(16);
  const Plan all = make_plan("m", mixture(2, 16), options, made_links());
  EXPECT_EQ(to_json(some), to_json(all));
}

TEST(PlanExperts, RefusesUsesOfOthers) {
  const auto plan = [](const std::vector<PlanUnit>& units, std::int64_t routed,
                       const std::string& layer = "", std::size_t experts = 0) {
    PlanOptions options{.ram = 64 * kMiB, .routed = routed};
    if (experts > 0) options.routing[layer] = std::vector<double>(experts, 1);
    return make_plan("m", units, options, made_links());
  };
  const std::vector<PlanUnit> units = mixture(1, 16), dense = test::language_model(1, 64, 64);
  const std::string first = layer_name(0);
  EXPECT_STOWAGE_ERROR(plan(units, 2, first, 17), invalid_argument,
                       "all 16 of model.layers.0, got 17");
  EXPECT_STOWAGE_ERROR(plan(mixture_of_stacks(1, 16), 2, first, 8), invalid_argument,
                       "all 16 of model.layers.0, got 8");
  EXPECT_STOWAGE_ERROR(plan(units, 2, layer_name(5), 16), invalid_argument, "got model.layers.5");
  EXPECT_STOWAGE_ERROR(plan(dense, 2), invalid_argument, "must be of a model that has some");
  EXPECT_STOWAGE_ERROR(plan(units, -1), invalid_argument, "routed must be at least 0");
  EXPECT_STOWAGE_ERROR(plan(units, 0, first, 16), invalid_argument, "must come with routed");
}

TEST(PlanExperts, UsesAreReadAsPythonWritesThem) {
  const auto read = routing_from_json(R"({"stowage_uses": 1, "weights": {
      "model.layers.3.mlp.experts.gate_up_proj": {"hits": 1, "by_index": [1, 2]},
      "model.layers.3.mlp.experts.down_proj": {"hits": 1, "by_index": [4, 2]},
      "model.layers.3.self_attn.q_proj.weight": {"hits": 9, "by_index": []},
      "model.layers.4.mlp.experts.2.up_proj.weight": {"hits": 1, "by_index": [5]},
      "model.layers.4.mlp.experts.2.down_proj.weight": {"hits": 1, "by_index": [4]},
      "model.layers.4.mlp.experts.0.up_proj.weight": {"hits": 1, "by_index": [3]}}})");
  EXPECT_EQ(read, (std::map<std::string, std::vector<double>>{{"model.layers.3", {4, 2}},
                                                              {"model.layers.4", {3, 0, 5}}}));
  for (const char* broken :
       {"{", "{}", R"({"stowage_uses": 2, "weights": {}})", R"({"stowage_uses": 1})",
        R"({"stowage_uses": 1, "weights": {"a": {}}})",
        R"({"stowage_uses": 1, "weights": {"a": {"by_index": [-1]}}})",
        R"({"stowage_uses": 1, "weights": {"a": {"by_index": ["1"]}}})"})
    EXPECT_THROW(routing_from_json(broken), Error) << broken;
}

TEST(PlanExperts, AreInTheJsonAndItComesBack) {
  const Plan plan = make_plan("m", mixture_of_stacks(2, 8),
                              {.ram = 5 * kMiB, .rows = 3, .routed = 2}, made_links());
  const std::string text = to_json(plan);
  EXPECT_THAT(text, HasSubstr("\"hits\""));
  EXPECT_EQ(to_json(plan_from_json(text)), text);
  EXPECT_THAT(
      to_json(make_plan("m", test::language_model(1, 64, 64), {.ram = 5 * kMiB}, made_links())),
      Not(HasSubstr("\"hits\"")));
}

TEST(PlanExperts, APlanIsForStacksAsTheyRest) {
  const Plan plan =
      make_plan("m", mixture_of_stacks(2, 8), {.ram = 9 * kMiB, .routed = 2}, made_links());
  check_plan(plan, "m", mixture_of_stacks(2, 8));
  EXPECT_THROW(check_plan(plan, "m", mixture_of_stacks(2, 9)), Error);
  PlanOptions as_nf4{.ram = 9 * kMiB, .storage = parse_storage("nf4"), .routed = 2};
  const Plan packed = make_plan("m", mixture_of_stacks(2, 8), as_nf4, made_links());
  EXPECT_STOWAGE_ERROR(check_plan(packed, "m", mixture_of_stacks(2, 8)), invalid_argument,
                       "pack or stow them");
}

TEST(PlanExperts, AReportSaysWhereTheMatricesOfAStackAre) {
  const Plan plan =
      make_plan("m", mixture_of_stacks(2, 8), {.ram = 6 * kMiB, .routed = 2}, made_links());
  Report report{.model = "m"};
  for (const PlanUnit& unit : mixture_of_stacks(2, 8))
    report.weights.push_back(
        {.name = unit.name, .storage = "bf16", .shape = unit.shape, .bytes = unit.rest});
  place(report, plan);
  EXPECT_EQ(report.weights[0].tier, "ram");
  EXPECT_EQ(report.weights[1].tier, "disk and ram");
  place(report, plan);
  EXPECT_EQ(report.weights[1].tier, "disk and ram") << "not added to what it was";
}

}  // namespace
}  // namespace stowage
