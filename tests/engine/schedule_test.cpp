// SPDX-License-Identifier: Apache-2.0
// Random schedules: threads, orders, budgets, held leases. Every lease must show the bytes that the
// all-resident run shows.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "engine/model.h"

namespace stowage {
namespace {
using namespace test;

constexpr int kScheduled = 12;

// What a random half of the schedules keeps: as much as leaves room for the largest unit.
template <class Random>
void keep_some(Engine& engine, std::uint64_t ram, Random& random) {
  if (random() % 2 == 0) return;
  std::uint64_t room = ram - largest(engine);
  std::vector<WeightId> kept;
  for (WeightId id = 0; id < engine.size(); ++id) {
    if (random() % 2 == 0 || engine.bytes(id) > room) continue;
    kept.push_back(id);
    room -= engine.bytes(id);
  }
  engine.keep(kept);
}

struct Schedules : testing::Test {
  Scratch scratch_;
  File file_ =
      File::open(write_model(scratch_, {.weights = kScheduled, .rows = 24, .columns = 64}));
  Needs needs_{file_};

  // One thread's uses: mostly one of three orders, now and then a jump; up to three leases at once.
  bool use(Engine& engine, std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::vector<int> order(kScheduled);
    for (int i = 0; i < kScheduled; ++i) order[static_cast<std::size_t>(i)] = i;
    if (seed % 3 == 1) std::ranges::reverse(order);
    if (seed % 3 == 2) std::ranges::shuffle(order, random);
    std::vector<std::pair<int, Lease>> held;
    for (int step = 0; step < 60; ++step) {
      if (step % 20 == 0) engine.set_signature(random() % 3);
      const int i = random() % 8 == 0 ? static_cast<int>(random() % kScheduled)
                                      : order[static_cast<std::size_t>(step % kScheduled)];
      held.emplace_back(i, engine.acquire(engine.find(weight_name(i)).value()));
      for (const auto& [k, lease] : held)
        if (!same_bytes(lease.weight(), file_.weight(weight_name(k)))) return false;
      while (held.size() > random() % 4) held.pop_back();
    }
    return true;
  }
};

TEST_F(Schedules, AllShowTheBytesOfTheResidentRun) {
  const char* const wanted = std::getenv("STOWAGE_SCHEDULES");  // `make test-all` sets 1000
  const int count = wanted != nullptr ? std::atoi(wanted) : 60;
  for (int schedule = 0; schedule < count; ++schedule) {
    std::mt19937_64 random(static_cast<std::uint64_t>(schedule));
    const EngineOptions options{.ram = needs_.least + random() % (needs_.all - needs_.least),
                                .reads = static_cast<Reads>(1 + random() % 3),
                                .workers = static_cast<int>(random() % 4)};
    Engine engine(file_, options);
    keep_some(engine, options.ram, random);
    std::atomic<bool> right = true;
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 1 + random() % 4; ++t)
      threads.emplace_back([&, seed = random()] {
        if (!use(engine, seed)) right = false;
      });
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(right) << "schedule " << schedule;
    ASSERT_LE(engine.report().peak, options.ram);
  }
}

}  // namespace
}  // namespace stowage
