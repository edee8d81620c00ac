// SPDX-License-Identifier: Apache-2.0
#include "engine/order.h"

#include <gtest/gtest.h>

#include <vector>

namespace stowage::engine {
namespace {

Turn run(Order& order, Turn turn, const std::vector<WeightId>& uses) {
  for (const WeightId id : uses) {
    order.learn(turn, id);
    turn = turn.then(id);
  }
  return turn;
}

std::vector<WeightId> walk(const Order& order, Turn turn, int steps) {
  std::vector<WeightId> seen;
  for (int i = 0; i < steps; ++i) {
    const WeightId next = order.next(turn);
    if (next == kNone) break;
    seen.push_back(next);
    turn = turn.then(next);
  }
  return seen;
}

TEST(Order, KnowsNothingAtFirst) {
  const Order order(3);
  EXPECT_EQ(order.next({}), kNone);
  EXPECT_EQ(order.next({.current = 1}), kNone);
}

TEST(Order, GoesOnFromTheEndOfAPassToItsStart) {
  Order order(4);
  const Turn turn = run(order, {}, {0, 1, 2, 3, 0});
  EXPECT_EQ(walk(order, turn, 6), (std::vector<WeightId>{1, 2, 3, 0, 1, 2}));
}

TEST(Order, TellsForwardFromBackward) {
  Order order(4);
  const Turn turn = run(order, {}, {0, 1, 2, 3, 3, 2, 1, 0, 0, 1});
  EXPECT_EQ(walk(order, turn, 8), (std::vector<WeightId>{2, 3, 3, 2, 1, 0, 0, 1}));
}

// Activation checkpointing: each block goes forward again before it goes backward.
TEST(Order, TellsAForwardFromOneThatIsComputedAgain) {
  Order order(4);
  const std::vector<WeightId> pass{0, 1, 2, 3, 2, 3, 3, 2, 0, 1, 1, 0};
  Turn turn;
  for (int i = 0; i < 5; ++i) turn = run(order, turn, pass);
  std::vector<WeightId> twice = pass;
  twice.insert(twice.end(), pass.begin(), pass.end());
  EXPECT_EQ(walk(order, turn, 24), twice);
}

TEST(Order, LearnsHowLongUntilAWeightComesAgain) {
  Order order(4);
  Turn first, second;
  Turn turn;
  for (int i = 0; i < 3; ++i) {  // 0 comes again after one use, and then after three
    turn = first = run(order, turn, {0});
    turn = second = run(order, turn, {0});
    turn = run(order, turn, {1, 2});
  }
  EXPECT_EQ(order.interval(first), 0u);
  order.learn_interval(first, 1);
  order.learn_interval(second, 3);
  EXPECT_EQ(order.interval(first), 1u);
  EXPECT_EQ(order.interval(second), 3u);
  order.learn(first, 0);
  EXPECT_EQ(order.interval(first), 1u);
  EXPECT_EQ(order.interval(first.then(3)), 0u);
  order.learn_interval(first.then(3), 7);  // of what is not known nothing is kept
  EXPECT_EQ(order.interval(first.then(3)), 0u);
}

TEST(Order, OneSignatureLeavesRoomForOthers) {
  Order order(9);
  run(order, {.signature = 1}, {0, 5});
  for (WeightId id = 1; id < 9; ++id) run(order, {.signature = 2, .current = id}, {0, id});
  EXPECT_EQ(order.next({.signature = 1, .current = 0}), 5);
}

TEST(Order, KeepsSignaturesApart) {
  Order order(4);
  run(order, {.signature = 1}, {0, 1, 2, 3, 0, 1});
  run(order, {.signature = 2}, {0, 3, 1, 2, 0, 3});
  EXPECT_EQ(walk(order, {1, 3, 0}, 3), (std::vector<WeightId>{1, 2, 3}));
  EXPECT_EQ(walk(order, {2, 2, 0}, 3), (std::vector<WeightId>{3, 1, 2}));
  EXPECT_EQ(order.next({.signature = 9, .current = 0}), 3);  // unknown: as it went last
}

TEST(Order, AChangedBranchIsLearntAtOnce) {
  Order order(5);
  Turn turn = run(order, {}, {0, 1, 2, 3, 0, 1, 2, 3});
  turn = run(order, turn, {0, 1, 4, 3, 0, 1});
  EXPECT_EQ(walk(order, turn, 2), (std::vector<WeightId>{4, 3}));
}

}  // namespace
}  // namespace stowage::engine
