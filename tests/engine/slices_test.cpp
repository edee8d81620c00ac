// SPDX-License-Identifier: Apache-2.0
// Weights that come by rows: each expert of a stack is a resident of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;

constexpr std::int64_t kIndices = 8, kIndexRows = 64, kIndexColumns = 256;
const char* const kStackStorages[] = {"bf16",
                                      "int8:row2",
                                      "int8:row",
                                      "f8_e4m3:tensor",
                                      "f8_e4m3:block128x128",
                                      "f8_e4m3:block32:e8m0",
                                      "nf4",
                                      "nf4:block64:nested",
                                      "mxfp4:transposed",
                                      "nvfp4",
                                      "nvfp4:row",
                                      "nvfp4:row2",
                                      "int4:block64:f16:zero",
                                      "int3:block64",
                                      "q4_k",
                                      "q6_k"};

std::string stack_name(std::size_t i) { return "layer." + std::to_string(10 + i) + ".experts"; }

// A stack in each storage, and a matrix before each.
std::string write_stacks(const Scratch& scratch) {
  std::vector<Declaration> tensors;
  WriterOptions options;
  std::vector<Weight> weights;
  const auto add = [&](const std::string& name, const char* storage, const Shape& shape) {
    weights.push_back(made_weight(parse_storage(storage), shape));
    for (Declaration& part : disk_layout(name, weights.back().storage(), shape))
      tensors.push_back(std::move(part));
    options.weights.push_back({name, weights.back().storage(), shape, {}, {}});
  };
  for (std::size_t i = 0; i < std::size(kStackStorages); ++i) {
    add("layer." + std::to_string(10 + i) + ".attention", "int8:row", Shape{24, kIndexColumns});
    add(stack_name(i), kStackStorages[i], Shape{kIndices, kIndexRows, kIndexColumns});
  }
  Writer writer(scratch.path("model.safetensors"), tensors, options);
  for (std::size_t i = 0; i < weights.size(); ++i)
    writer.write_weight(options.weights[i].name, weights[i]);
  writer.finish();
  return scratch.path();
}

// The bytes that rows of a stack have of a part; all of what they share.
bool same_rows(const Weight& some, const Weight& all, std::int64_t first) {
  const Layout of_some = layout(some.storage(), some.shape()),
               of_all = layout(all.storage(), all.shape());
  for (int i = 0; i < of_some.count; ++i) {
    const auto bytes = of_some.parts[static_cast<std::size_t>(i)].bytes;
    const auto whole = of_all.parts[static_cast<std::size_t>(i)].bytes;
    const std::int64_t each = whole / all.rows(), count = some.rows();
    const bool shared = bytes == whole;
    EXPECT_TRUE(shared || bytes == each * count);
    const auto* const from =
        static_cast<const std::byte*>(all.part(i)) + (shared ? 0 : first * each);
    if (std::memcmp(some.part(i), from, static_cast<std::size_t>(bytes)) != 0) return false;
  }
  return some.storage() == all.storage();
}

class Slices : public testing::TestWithParam<Reads> {
 protected:
  Scratch scratch_;
  File file_ = File::open(write_stacks(scratch_));

  EngineOptions options(std::uint64_t ram, std::int64_t rows = 1, int workers = 2) const {
    EngineOptions options{.ram = ram, .reads = GetParam(), .workers = workers};
    for (std::size_t i = 0; i < std::size(kStackStorages); ++i)
      options.by_rows.push_back({stack_name(i), rows});
    return options;
  }
  std::uint64_t least(std::int64_t rows = 1) const {
    EngineOptions all = options(std::uint64_t{1} << 40, rows, 0);
    all.reads = Reads::mapped;
    return largest(Engine(file_, all));
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, Slices,
                         testing::Values(Reads::mapped, Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Slices, HaveTheirBytesUnderTheSmallestBudget) {
  for (const std::int64_t rows : {1, 3, 8}) {
    Engine engine(file_, options(least(rows), rows));
    for (std::size_t i = 0; i < std::size(kStackStorages); ++i) {
      const WeightId whole = engine.find(stack_name(i)).value();
      const SliceIds slices = engine.slices(whole);
      EXPECT_EQ(slices.count, (kIndices + rows - 1) / rows);
      EXPECT_EQ(engine.bytes(whole), 0u);
      const Weight all = file_.weight(stack_name(i));
      for (WeightId k = slices.count; k-- > 0;) {
        const Lease lease = engine.acquire(slices.first + k);
        EXPECT_EQ(lease.weight().rows(), std::min(rows, kIndices - k * rows));
        EXPECT_TRUE(same_rows(lease.weight(), all, k * rows)) << kStackStorages[i] << " " << k;
      }
    }
    EXPECT_EQ(engine.report().borrowed, 0u);
    EXPECT_LE(engine.report().peak, least(rows));
  }
}

TEST_P(Slices, AreReadAlone) {
  Engine engine(file_, options(std::uint64_t{1} << 30, 1, 0));
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < std::size(kStackStorages); ++i) {
    const SliceIds slices = engine.slices(engine.find(stack_name(i)).value());
    for (const WeightId k : {5, 2, 5}) (void)engine.acquire(slices.first + k);
    bytes += engine.bytes(slices.first + 2) + engine.bytes(slices.first + 5);
    EXPECT_EQ(engine.name(slices.first + 5), stack_name(i) + "[5]");
  }
  const EngineReport report = engine.report();
  EXPECT_EQ(report.misses, 2 * std::size(kStackStorages));
  EXPECT_EQ(report.hits, std::size(kStackStorages));
  EXPECT_EQ(report.held, bytes);
  EXPECT_LE(report.bytes_read, bytes);
}

TEST_P(Slices, AreFoundByAddress) {
  Engine engine(file_, options(least(), 1, 0));
  const Weight all = file_.weight(stack_name(1));
  const auto* const codes = static_cast<const std::byte*>(all.part(0));
  constexpr std::uint64_t kBytes = kIndexRows * kIndexColumns;
  {
    const auto one = Engine::lease_at(codes + 3 * kBytes, false, kBytes);
    ASSERT_TRUE(one);
    EXPECT_EQ(std::memcmp(one->at(codes + 3 * kBytes), codes + 3 * kBytes, kBytes), 0);
    EXPECT_EQ(one->at(codes + 4 * kBytes), codes + 4 * kBytes);
  }
  EXPECT_EQ(engine.report().misses, 1u);
  {
    const auto two = Engine::lease_at(codes + 3 * kBytes, false, kBytes + 1);
    ASSERT_TRUE(two);
    EXPECT_EQ(two->at(codes + 3 * kBytes), codes + 3 * kBytes);
    EXPECT_TRUE(same_bytes(two->weight(), all));
  }
  EXPECT_EQ(engine.report().borrowed, 1u);
}

TEST_P(Slices, ThatAreWantedAreReadAhead) {
  const std::uint64_t room = 4 * least();
  Engine engine(file_, options(room));
  for (int turn = 0; turn < 3; ++turn) {
    for (std::size_t i = 0; i < std::size(kStackStorages); ++i) {
      const Weight all = file_.weight(stack_name(i));
      const SliceIds slices = engine.slices(engine.find(stack_name(i)).value());
      const std::int64_t wanted[] = {1, 6, 3, -1, kIndices};
      EXPECT_TRUE(Engine::want_at(std::vector{all.part(0)}, wanted));
      for (const WeightId k : {1, 6, 3})
        EXPECT_TRUE(same_rows(engine.acquire(slices.first + k).weight(), all, k));
    }
  }
  const EngineReport report = engine.report();
  EXPECT_EQ(report.misses, 0u);
  EXPECT_EQ(report.hits + report.late, report.acquired);
  EXPECT_LE(report.peak, room);
  // Numbers count from the slice of the byte.
  const Weight last = file_.weight(stack_name(1));
  const auto* const codes = static_cast<const std::byte*>(last.part(0));
  const std::int64_t behind[] = {1, 2};
  EXPECT_TRUE(
      Engine::want_at(std::array<const void*, 1>{codes + 6 * kIndexRows * kIndexColumns}, behind));
  (void)engine.acquire(engine.slices(engine.find(stack_name(1)).value()).first + 7);
  EXPECT_EQ(engine.report().misses, 0u);
  const Weight matrix = file_.weight("layer.10.attention");
  EXPECT_FALSE(Engine::want_at(std::vector{matrix.part(0)}, std::vector<std::int64_t>{0}));
}

// Who wants some of one weight is taken to want those of the weights behind it, and of no other.
TEST_P(Slices, ThatAreUsedTogetherAreReadTogether) {
  Engine engine(file_, options(8 * least()));
  std::vector<const void*> places;
  for (std::size_t i = 0; i < 3; ++i) places.push_back(file_.weight(stack_name(i)).part(0));
  Engine::together(places);
  const auto read = [&](std::size_t i, WeightId k) {
    const auto id = engine.slices(engine.find(stack_name(i)).value()).first + k;
    return engine.uses(id).ahead + engine.uses(id).misses;
  };
  const std::int64_t wanted[] = {2};
  const auto want = [&](std::size_t i) { return Engine::want_at(std::array{places[i]}, wanted); };
  EXPECT_TRUE(want(1));
  EXPECT_EQ(read(0, 2), 0u);
  EXPECT_EQ(read(1, 2), 1u);
  EXPECT_EQ(read(2, 2), 1u);
  Engine::together(std::array{places[1], places[0], places[1]});  // said anew; once each
  const std::int64_t other[] = {3};
  EXPECT_TRUE(Engine::want_at(std::array{places[1]}, other));
  EXPECT_EQ(read(0, 3) + read(1, 3), 2u);
  EXPECT_EQ(read(2, 3), 0u);
  // Of several, those that are said; numbers count from the slice of the byte in all of them.
  const std::int64_t third[] = {4};
  EXPECT_TRUE(Engine::want_at(std::array{places[1], places[2]}, third));
  EXPECT_EQ(read(0, 4), 0u);
  EXPECT_EQ(read(2, 4), 1u);
  const auto* const codes = static_cast<const std::byte*>(places[1]);
  const std::int64_t first[] = {1};
  EXPECT_TRUE(
      Engine::want_at(std::array<const void*, 1>{codes + 4 * kIndexRows * kIndexColumns}, first));
  EXPECT_EQ(read(1, 5) + read(0, 5), 2u);
  Engine::together(std::array<const void*, 2>{file_.weight("layer.10.attention").part(0), nullptr});
}

TEST_P(Slices, StayWhereTheirWeightIsKept) {
  const EngineOptions sizes = options(std::uint64_t{1} << 30, 1, 0);
  std::uint64_t bytes = 0;
  {
    const Engine engine(file_, sizes);
    const SliceIds slices = engine.slices(engine.find(stack_name(0)).value());
    for (WeightId k = 0; k < slices.count; ++k) bytes += engine.bytes(slices.first + k);
  }
  Engine engine(file_, options(bytes + least(), 1, 0));
  engine.keep(std::vector{engine.find(stack_name(0)).value()});
  EXPECT_EQ(engine.report().held, bytes);
  for (int turn = 0; turn < 2; ++turn)
    for (std::size_t i = 0; i < std::size(kStackStorages); ++i) {
      const SliceIds slices = engine.slices(engine.find(stack_name(i)).value());
      for (WeightId k = 0; k < slices.count; ++k) (void)engine.acquire(slices.first + k);
    }
  const auto kept = static_cast<std::uint64_t>(kIndices);
  EXPECT_GE(engine.report().hits, kept);  // of the small ones, one or two may stay too
  EXPECT_LE(engine.report().hits, kept + 2);
  EXPECT_EQ(engine.report().misses + engine.report().hits,
            2 * std::size(kStackStorages) * kIndices);
}

// The order of what comes as a whole is learnt though slices come between, other ones each time.
TEST_P(Slices, LeaveTheOrderOfOthersAlone) {
  Engine engine(file_, options(12 * least()));
  for (int pass = 0; pass < 6; ++pass) {
    for (std::size_t i = 0; i < std::size(kStackStorages); ++i) {
      const std::uint64_t before = engine.report().misses;
      (void)engine.acquire(engine.find("layer." + std::to_string(10 + i) + ".attention").value());
      if (pass >= 2) {
        EXPECT_EQ(engine.report().misses, before) << pass << " " << i;
      }
      const std::int64_t expert = (3 * pass + static_cast<int>(i)) % kIndices;
      const SliceIds slices = engine.slices(engine.find(stack_name(i)).value());
      engine.want(std::vector{slices.first + static_cast<WeightId>(expert)});
      (void)engine.acquire(slices.first + static_cast<WeightId>(expert));
    }
  }
}

// Waits until nothing is being read.
void settle(const Engine& engine, std::uint64_t held) {
  for (int i = 0; engine.report().held < held; ++i) {
    ASSERT_LT(i, 5000) << engine.report().ahead << " begun, " << engine.report().held << " of "
                       << held;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A guess comes behind what is used, and in the order of use once that is known.
TEST_P(Slices, WhatIsWantedAfterComesBehind) {
  Engine probe(file_, options(std::uint64_t{1} << 30, 1, 0));
  const SliceIds slices = probe.slices(probe.find(stack_name(0)).value());  // of bf16
  const std::uint64_t one = probe.bytes(slices.first);
  const auto id = [&](int i) { return slices.first + static_cast<WeightId>(i); };
  EngineOptions two = options(0);
  two.ram = std::max(3 * one, least());
  ASSERT_LT(two.ram, 6 * one);
  Engine engine(file_, two);
  EXPECT_TRUE(engine.want(std::array{id(0), id(1)}));
  EXPECT_TRUE(engine.want(std::array{id(2), id(3), id(4), id(5)}, true));
  engine.acquire(id(0));
  engine.acquire(id(1));
  EXPECT_EQ(engine.report().misses, 0u);  // a guess put out neither
  EXPECT_GE(engine.report().ahead, 3u);   // and was begun
  // What is being read cannot go: until all that have room are there.
  const auto are_there = [&] {
    std::uint64_t there = 0;
    for (int i = 0; i < 6; ++i) there += engine.want(std::array{id(i)}, true) ? 0 : one;
    return there >= engine.report().held / one * one;
  };
  for (int i = 0; !are_there() && i < 5000; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(engine.want(std::array{id(6), id(7)}));  // the guess was wrong
  engine.acquire(id(6));
  engine.acquire(id(7));
  EXPECT_EQ(engine.report().misses, 0u);
  EXPECT_EQ(engine.report().borrowed, 0u);
  EXPECT_GE(engine.report().unused, 1u);
  EXPECT_FALSE(engine.want(std::array{id(7)}));  // it is there
}

TEST_P(Slices, UsesOfAllAddUpToTheReport) {
  for (const int workers : {0, 2})
    for (const std::uint64_t ram : {2 * least(), std::uint64_t{1} << 30}) {
      Engine engine(file_, options(ram, 1, workers));
      std::uint32_t state = 7;
      const auto next = [&](std::size_t below) {
        state = state * 1664525u + 1013904223u;
        return static_cast<WeightId>((state >> 8) % below);
      };
      for (int step = 0; step < 400; ++step) {
        const SliceIds slices =
            engine.slices(engine.find(stack_name(next(std::size(kStackStorages)))).value());
        const WeightId some[]{slices.first + next(kIndices), slices.first + next(kIndices)};
        engine.want(some);
        const Lease lease = engine.acquire(some[step % 2]), same = engine.acquire(some[step % 2]);
        if (step % 3 == 0) engine.acquire(next(static_cast<std::size_t>(engine.named())));
      }
      const EngineReport all = engine.report();
      WeightUses sum;
      double stall = 0;
      std::uint64_t acquired = 0;
      for (const WeightUses& one : engine.uses()) {
        sum.hits += one.hits, sum.misses += one.misses, sum.late += one.late;
        sum.borrowed += one.borrowed, sum.ahead += one.ahead, sum.unused += one.unused;
        stall += one.stall, acquired += one.acquired();
      }
      EXPECT_EQ(sum.hits, all.hits);
      EXPECT_EQ(sum.misses, all.misses);
      EXPECT_EQ(sum.late, all.late);
      EXPECT_EQ(sum.borrowed, all.borrowed);
      EXPECT_EQ(sum.ahead, all.ahead);
      EXPECT_EQ(sum.unused, all.unused);
      EXPECT_NEAR(stall, all.stall, 1e-6);
      EXPECT_EQ(acquired, all.acquired);
      EXPECT_LE(all.unused, all.ahead);
      EXPECT_EQ(all.unused == 0, workers == 0 || ram > 2 * least()) << all.unused;
    }
}

// Of what stays as well, by threads that have ended and others.
TEST_P(Slices, UsesOfWhatStaysAreCountedByThreads) {
  Engine engine(file_, options(std::uint64_t{1} << 30));
  const WeightId id = engine.slices(engine.find(stack_name(1)).value()).first + 2;
  const auto use = [&] {
    for (int i = 0; i < 500; ++i) engine.acquire(id);
  };
  std::thread one(use), two(use);
  use();
  one.join(), two.join();
  EXPECT_EQ(engine.uses(id).acquired(), 1500u);
  EXPECT_EQ(engine.report().acquired, 1500u);
  EXPECT_EQ(engine.uses(id + 1).acquired(), 0u);
}

// What was prefetched in vain.
TEST_P(Slices, AReadThatNobodyUsedIsTold) {
  EngineOptions two = options(0);
  Engine probe(file_, options(std::uint64_t{1} << 30, 1, 0));
  const SliceIds slices = probe.slices(probe.find(stack_name(0)).value());  // of bf16
  two.ram = std::max(2 * probe.bytes(slices.first), least());
  const auto fits = static_cast<WeightId>(two.ram / probe.bytes(slices.first));
  Engine engine(file_, two);
  std::vector<WeightId> wanted(static_cast<std::size_t>(fits));
  for (WeightId i = 0; i < fits; ++i) wanted[static_cast<std::size_t>(i)] = slices.first + i;
  ASSERT_LT(2 * fits, kIndices + 1);
  engine.want(wanted);
  settle(engine, static_cast<std::uint64_t>(fits) * probe.bytes(slices.first));
  engine.acquire(slices.first);
  for (WeightId& id : wanted) id += fits;
  engine.want(wanted);  // instead
  for (const WeightId id : wanted) engine.acquire(id);
  EXPECT_GE(engine.report().ahead, static_cast<std::uint64_t>(fits));
  EXPECT_EQ(engine.report().unused, static_cast<std::uint64_t>(fits) - 1);
  const std::vector<WeightUses> uses = engine.uses();
  EXPECT_EQ(uses[static_cast<std::size_t>(slices.first)].unused, 0u);
  EXPECT_EQ(uses[static_cast<std::size_t>(slices.first) + 1].unused, 1u);
  EXPECT_EQ(uses[static_cast<std::size_t>(slices.first) + 1].acquired(), 0u);
}

class Foreseen : public Slices {
 protected:
  // An engine of one stack of bf16, and of no more than `room` of its slices.
  std::unique_ptr<Engine> make(int room, int workers) const {
    EngineOptions one = options(0, 1, workers);
    const Engine probe(file_, options(std::uint64_t{1} << 30, 1, 0));
    for (WeightId id = 0; id < probe.named(); ++id)
      if (probe.name(id) != stack_name(0)) one.mapped_only.push_back(probe.name(id));
    each_ = probe.bytes(probe.slices(probe.find(stack_name(0)).value()).first);
    one.ram = static_cast<std::uint64_t>(room) * each_;
    auto made = std::make_unique<Engine>(file_, one);
    first_ = made->slices(made->find(stack_name(0)).value()).first;
    return made;
  }
  std::vector<std::uint64_t> uses(const Engine& engine, std::vector<std::uint64_t> counts) const {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(engine.size()));
    std::ranges::copy(counts, all.begin() + first_);
    return all;
  }
  mutable std::uint64_t each_ = 0;
  mutable WeightId first_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Reads, Foreseen, testing::Values(Reads::mapped, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Foreseen, WhatWasUsedMostIsReadAtOnce) {
  const auto engine = make(3, 2);
  engine->foresee(uses(*engine, {1, 0, 9, 3, 0, 7, 2, 8}));
  settle(*engine, 3 * each_);
  for (const WeightId i : {2, 5, 7}) engine->acquire(first_ + i);
  EXPECT_EQ(engine->report().misses, 0u);
  EXPECT_EQ(engine->report().ahead, 3u);
  EXPECT_LE(engine->report().peak, 3 * each_);
}

TEST_P(Foreseen, WhatWasUsedMostStays) {
  for (const bool told : {false, true}) {
    const auto engine = make(3, 0);
    if (told) engine->foresee(uses(*engine, {90, 1, 1, 1, 1, 1, 1, 1}));
    engine->acquire(first_);
    for (WeightId i = 1; i < 6; ++i) engine->acquire(first_ + i);
    engine->acquire(first_);
    EXPECT_EQ(engine->report().hits, told ? 1u : 0u);
  }
}

TEST_P(Foreseen, OfEachWeightBeforeTheFirstUse) {
  const auto engine = make(3, 0);
  EXPECT_STOWAGE_ERROR(engine->foresee(std::vector<std::uint64_t>(5)), invalid_argument,
                       "uses must be of each of");
  engine->acquire(first_);
  EXPECT_STOWAGE_ERROR(engine->foresee(uses(*engine, {1})), invalid_argument,
                       "must be said before the first");
}

TEST(SlicesRefused, NameWhatWasWrong) {
  const Scratch scratch;
  const File file = File::open(write_stacks(scratch));
  const auto open = [&](const std::string& name, std::int64_t rows) {
    EngineOptions options{.ram = std::uint64_t{1} << 30, .reads = Reads::mapped};
    options.by_rows.push_back({name, rows});
    const Engine engine(file, options);
  };
  EXPECT_STOWAGE_ERROR(open("nowhere", 1), invalid_argument, "must have a weight nowhere");
  EXPECT_STOWAGE_ERROR(open(stack_name(0), 0), invalid_argument,
                       "must come by at least one row, got 0");
  EXPECT_NO_THROW(open("layer.10.attention", 5));  // a matrix, by rows that do not divide it
  EngineOptions twice{.ram = std::uint64_t{1} << 30, .reads = Reads::mapped};
  twice.by_rows = {{stack_name(0), 1}, {stack_name(0), 2}};
  EXPECT_STOWAGE_ERROR(Engine(file, twice), invalid_argument, "must come by rows in one way");
}

TEST(SlicesRefused, EndInABlock) {
  const Scratch scratch;
  const Shape shape{4, 3, 8};  // flat blocks of 64 do not end with an index
  const Weight weight = made_weight(parse_storage("nf4"), shape);
  WriterOptions options;
  options.weights.push_back({"experts", weight.storage(), shape, {}, {}});
  Writer writer(scratch.path("model.safetensors"), disk_layout("experts", weight.storage(), shape),
                options);
  writer.write_weight("experts", weight);
  writer.finish();
  const File file = File::open(scratch.path());
  EngineOptions asked{.ram = std::uint64_t{1} << 20, .reads = Reads::mapped};
  asked.by_rows.push_back({"experts", 1});
  EXPECT_STOWAGE_ERROR(Engine(file, asked), invalid_argument,
                       "must come by rows that end where absmax of 64 elements do, got 1 of 24");
}

}  // namespace
}  // namespace stowage
