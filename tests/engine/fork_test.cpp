// SPDX-License-Identifier: Apache-2.0
// Children that are forked at every step of an engine's life read through the mapping, and end.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "engine/faulty_reader.h"
#include "engine/model.h"
#include "expect_error.h"
#include "forked.h"
#include "stowage/trace.h"

namespace stowage {
namespace {
using namespace test;

constexpr int kForkedWeights = 6;

// What a child does with an engine of its parent's, as a model would.
bool reads_all(const File& file, Engine& engine) {
  std::vector<WeightId> order;
  for (int i = 0; i < kForkedWeights; ++i) order.push_back(engine.find(weight_name(i)).value());
  engine.keep(order);
  engine.expect(order);
  engine.set_signature(7);
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < kForkedWeights; ++i) {
      const Weight mapped = file.weight(weight_name(i));
      const Lease lease = engine.acquire(order[static_cast<std::size_t>(i)]);
      if (!same_bytes(lease.weight(), mapped) || lease.at(mapped.part(0)) != mapped.part(0) ||
          Engine::lease_at(mapped.part(0)))
        return false;
    }
  }
  engine.cancel();
  const EngineReport report = engine.report();
  return report.reads == Reads::mapped && report.held == 0;
}

bool opens_another(const File& file) {
  Engine engine(file, {.ram = 1 << 20, .reads = Reads::buffered, .workers = 2});
  const Weight mapped = file.weight(weight_name(2));
  const std::optional<Lease> found = Engine::lease_at(mapped.part(0));
  return found && found->at(mapped.part(0)) != mapped.part(0) &&
         same_bytes(found->weight(), mapped) &&
         same_bytes(engine.acquire(engine.find(weight_name(3)).value()).weight(),
                    file.weight(weight_name(3))) &&
         engine.report().held > 0;
}

class Forks : public testing::TestWithParam<Reads> {
 protected:
  void SetUp() override {
    if (!kForksBesideThreads) GTEST_SKIP() << kNoForks;
  }
  Scratch scratch_;
  File file_ = File::open(write_model(scratch_, {.weights = kForkedWeights}));
  std::uint64_t least_ = Needs(file_).least;
  std::unique_ptr<Engine> make(std::uint64_t ram) const {
    return std::make_unique<Engine>(file_,
                                    EngineOptions{.ram = ram, .reads = GetParam(), .workers = 3});
  }
  WeightId id(int i) const { return make(1 << 24)->find(weight_name(i)).value(); }
};
INSTANTIATE_TEST_SUITE_P(Reads, Forks,
                         testing::Values(Reads::mapped, Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Forks, AtEveryStepOfALife) {
  for (const std::uint64_t ram : {least_ * 2, std::uint64_t{1} << 24}) {
    std::unique_ptr<Engine> engine = make(ram);
    const auto look = [&](const char* when) {
      const auto child = [&] { return reads_all(file_, *engine) && opens_another(file_); };
      EXPECT_EQ(in_child(child), "") << when;
      EXPECT_EQ(in_child(child, End::by_exit), "") << when;
      EXPECT_EQ(in_child([&] {
                  engine.reset();
                  return opens_another(file_);
                }),
                "")
          << when << ", and ends it";
      EXPECT_EQ(in_child([&] { return child() && in_child(child) == ""; }), "") << "a grandchild";
    };
    look("made");
    std::vector<WeightId> order;
    for (int i = 0; i < kForkedWeights; ++i) order.push_back(engine->find(weight_name(i)).value());
    engine->expect(order);
    look("told an order");
    (void)engine->acquire(order[0]);
    look("reading ahead");
    for (const WeightId one : order) (void)engine->acquire(one);
    for (const WeightId one : order) (void)engine->acquire(one);
    look("used");
    engine->cancel();
    look("cancelled");
    for (const WeightId one : order)  // the parent goes on
      EXPECT_TRUE(same_bytes(engine->acquire(one).weight(), file_.weight(engine->name(one))));
  }
}

TEST_P(Forks, WithALeaseInHand) {
  std::unique_ptr<Engine> engine = make(1 << 24);
  const WeightId first = engine->find(weight_name(1)).value();
  for (int use = 0; use < 3; ++use) {  // counted first, then one that stays
    auto lease = std::make_unique<Lease>(engine->acquire(first));
    const Weight mapped = file_.weight(weight_name(1));
    for (const bool ended : {false, true}) {
      EXPECT_EQ(in_child(
                    [&] {
                      if (ended) engine.reset();
                      const bool same = same_bytes(lease->weight(), mapped);
                      lease.reset();
                      return same;
                    },
                    End::by_exit),
                "");
    }
    EXPECT_TRUE(same_bytes(lease->weight(), mapped));
  }
  auto last = std::make_unique<Lease>(engine->acquire(first));
  engine.reset();  // the lease keeps what it needs
  EXPECT_EQ(in_child([&] {
              last.reset();
              return true;
            }),
            "");
}

TEST_P(Forks, WhileAReadIsInFlight) {
  FaultyReader reader;
  auto core =
      engine::core_on_disk(file_, {.ram = 1 << 24, .reads = GetParam(), .workers = 2}, reader);
  reader.close_gate();
  auto user = std::async(std::launch::async, [&] { return core->acquire(2).weight().shape(); });
  while (reader.reads == 0) std::this_thread::yield();
  EXPECT_EQ(in_child(
                [&] {
                  const Lease lease = core->acquire(2);
                  return same_bytes(lease.weight(), file_.weight(core->units()[2].name));
                },
                End::by_exit),
            "");
  reader.open_gate();
  (void)user.get();
  EXPECT_TRUE(same_bytes(core->acquire(2).weight(), file_.weight(core->units()[2].name)));
  core->stop();
}

// Whatever lock they hold at that moment, in whichever order.
TEST_P(Forks, WhileOtherThreadsUseEveryDoor) {
  std::unique_ptr<Engine> engine = make(least_ * 2);
  std::atomic<bool> over = false;
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (int i = 0; !over; ++i) {
      try {
        (void)engine->acquire(engine->find(weight_name(i % kForkedWeights)).value());
      } catch (const Error&) {  // cancelled
      }
    }
  });
  threads.emplace_back([&] {
    while (!over) {
      try {
        (void)make(1 << 24)->report();
        (void)Engine::lease_at(file_.weight(weight_name(0)).part(0));
      } catch (const Error&) {  // cancelled
      }
    }
  });
  threads.emplace_back([&] {
    while (!over) {
      start_trace(1000);
      (void)stop_trace();
      engine->cancel();
    }
  });
  for (int round = 0; round < 40; ++round) {
    const auto child = [&] { return reads_all(file_, *engine) && opens_another(file_); };
    const std::string told = in_child(child, round % 2 == 0 ? End::by_exit : End::at_once);
    EXPECT_EQ(told, "") << round;
    if (!told.empty()) break;
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace stowage
