// SPDX-License-Identifier: Apache-2.0
#include "engine/order.h"

#include <gtest/gtest.h>

#include <vector>

namespace stowage::engine {
namespace {

Place run(Order& order, Place place, const std::vector<WeightId>& uses) {
  for (const WeightId id : uses) {
    order.learn(place, id);
    place = {place.signature, place.current, id};
  }
  return place;
}

std::vector<WeightId> walk(const Order& order, Place place, int steps) {
  std::vector<WeightId> seen;
  for (int i = 0; i < steps; ++i) {
    const WeightId next = order.next(place);
    if (next == kNone) break;
    seen.push_back(next);
    place = {place.signature, place.current, next};
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
  const Place place = run(order, {}, {0, 1, 2, 3, 0});
  EXPECT_EQ(walk(order, place, 6), (std::vector<WeightId>{1, 2, 3, 0, 1, 2}));
}

TEST(Order, TellsForwardFromBackward) {
  Order order(4);
  const Place place = run(order, {}, {0, 1, 2, 3, 3, 2, 1, 0, 0, 1});
  EXPECT_EQ(walk(order, place, 8), (std::vector<WeightId>{2, 3, 3, 2, 1, 0, 0, 1}));
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
  Place place = run(order, {}, {0, 1, 2, 3, 0, 1, 2, 3});
  place = run(order, place, {0, 1, 4, 3, 0, 1});
  EXPECT_EQ(walk(order, place, 2), (std::vector<WeightId>{4, 3}));
}

}  // namespace
}  // namespace stowage::engine
