// SPDX-License-Identifier: Apache-2.0
// Units that lie in the page cache in small pages: which of them leave it and when, by times that
// the test tells, and that an engine reads those anew, whole and once, with the same bytes.
#include "engine/small_pages.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <map>
#include <thread>

#include "base/residency.h"
#include "engine/faulty_reader.h"
#include "engine/model.h"

namespace stowage::engine {
namespace {

using namespace test;

constexpr std::uint64_t kBytes = std::uint64_t{16} << 20;
constexpr double kSmall = 0.2e-6, kLarge = 0.005e-6;  // seconds of a page
constexpr int kEnough = 8;                            // visits that cost what a read does

class Visits : public testing::Test {
 protected:
  /// Whether the unit leaves after a visit of so many seconds a page.
  bool visit(WeightId id, double seconds, double part = 1) {
    const auto bytes = static_cast<std::uint64_t>(part * static_cast<double>(kBytes));
    if (pages_.is_asked(id, kBytes))
      pages_.note(id, bytes, seconds * static_cast<double>(bytes / kPage));
    return pages_.leaves(id, kBytes);
  }
  bool leaves_after_visits(WeightId id, int visits) {
    for (int i = 1; i < visits; ++i)
      if (visit(id, kSmall)) return false;
    return visit(id, kSmall);
  }
  void come_back(WeightId id) {
    EXPECT_TRUE(pages_.is_away(id));
    pages_.is_back(id);
    EXPECT_FALSE(pages_.is_away(id));
  }
  SmallPages pages_;
};

TEST_F(Visits, OneUnitIsTriedAndOthersFollowWhereItHelped) {
  EXPECT_TRUE(leaves_after_visits(3, kEnough));
  for (int i = 0; i < 2 * kEnough; ++i) EXPECT_FALSE(visit(5, kSmall));  // the first is tried
  come_back(3);
  EXPECT_FALSE(visit(3, kSmall, 0.5));  // half came from the disk: says nothing
  EXPECT_FALSE(visit(3, kSmall / 4));   // some pages stayed as they were
  EXPECT_FALSE(pages_.is_quick(3));
  EXPECT_TRUE(visit(5, kSmall));
  come_back(5);
  EXPECT_FALSE(visit(5, kLarge));
  EXPECT_TRUE(pages_.is_quick(5));
  EXPECT_FALSE(leaves_after_visits(3, 3 * kEnough));  // once
  EXPECT_FALSE(leaves_after_visits(5, 3 * kEnough));
}

TEST_F(Visits, NoneFollowsWhereItDidNotHelp) {
  EXPECT_TRUE(leaves_after_visits(0, kEnough));
  come_back(0);
  for (int i = 0; i < 8; ++i) EXPECT_FALSE(visit(0, kSmall));
  EXPECT_FALSE(pages_.is_quick(0));
  EXPECT_FALSE(leaves_after_visits(1, 3 * kEnough));
  EXPECT_FALSE(pages_.is_asked(1, kBytes));
}

TEST_F(Visits, AQuickOneEndsThem) {
  EXPECT_FALSE(leaves_after_visits(0, kEnough - 1));
  EXPECT_FALSE(pages_.is_quick(0));
  EXPECT_FALSE(visit(0, kLarge));
  EXPECT_TRUE(pages_.is_quick(0));
  EXPECT_FALSE(pages_.is_asked(0, kBytes));
  EXPECT_FALSE(leaves_after_visits(0, 3 * kEnough));
  EXPECT_FALSE(pages_.is_asked(1, std::uint64_t{1} << 20));  // too small for large pages
  EXPECT_FALSE(pages_.leaves(2, kBytes));                    // of which nothing was noted
}

TEST_F(Visits, AsManyAsCostWhatAReadDoes) {
  int visits = 1;
  while (!visit(0, kSmall / 10)) ++visits;
  EXPECT_NEAR(visits, 10 * kEnough, 1);
}

TEST_F(Visits, WhatWasQuickIsAskedAgainWhereItIsNoMore) {
  const auto map = [&](double seconds) {
    pages_.note_quick(0, kBytes, seconds * static_cast<double>(kBytes / kPage));
  };
  EXPECT_FALSE(visit(0, kLarge));
  map(kLarge);
  EXPECT_TRUE(pages_.is_quick(0));
  map(kSmall);
  EXPECT_FALSE(pages_.is_quick(0));
  EXPECT_TRUE(leaves_after_visits(0, kEnough));
}

// Takes as long as small pages would where units have not been read anew, or if that does not help.
class SlowPages final : public Reader {
 public:
  SlowPages(std::uint64_t of_unit, bool helps) : of_unit_(of_unit), helps_(helps) {}
  std::map<std::uint64_t, int> whole;  // by offset: how often a unit was asked for at once

  int populate(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes) override {
    const std::scoped_lock lock(mutex_);
    if (bytes >= of_unit_) ++whole[offset];
    const auto after = whole.upper_bound(offset);
    const bool quick =
        helps_ && after != whole.begin() && offset < std::prev(after)->first + of_unit_;
    const double until = now() + (quick ? 0 : 4e-6) * static_cast<double>(bytes / kPage);
    while (now() < until) {
    }
    return Reader::populate(file, offset, bytes);
  }

 private:
  static double now() {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  std::uint64_t of_unit_;
  bool helps_;
  std::mutex mutex_;
};

// Units of 6 MiB in a file.
class OfUnits : public testing::Test {
 protected:
  static constexpr int kUnits = 3;
  static constexpr std::size_t kUnit = std::size_t{6} << 20;
  static std::vector<std::uint8_t> bytes_of(int i) {
    std::vector<std::uint8_t> bytes(kUnit);
    for (std::size_t k = 0; k < kUnit; ++k)
      bytes[k] = static_cast<std::uint8_t>(k * 7 + k / 4096 + static_cast<std::size_t>(i));
    return bytes;
  }
  std::string write() const {
    std::vector<Declaration> tensors;
    for (int i = 0; i < kUnits; ++i)
      tensors.push_back({weight_name(i), Dtype::u8, Shape{6, kUnit / 6}, "", 0});
    Writer writer(scratch_.path("model.safetensors"), tensors, {});
    for (int i = 0; i < kUnits; ++i) {
      const std::vector<std::uint8_t> bytes = bytes_of(i);
      writer.write(weight_name(i), std::as_bytes(std::span(bytes)));
    }
    writer.finish();
    return scratch_.path("model.safetensors");
  }
  // Acquires unit i, and compares its bytes.
  static void use(const File& file, const OverReader& engine, int i) {
    const auto found = std::ranges::find(engine->units(), weight_name(i), &Unit::name);
    const auto lease = engine->acquire(static_cast<WeightId>(found - engine->units().begin()));
    const std::vector<std::uint8_t> wanted = bytes_of(i);
    const auto* mapped = file.bytes(*file.find(weight_name(i))).data();
    ASSERT_EQ(std::memcmp(lease.at(mapped), wanted.data(), kUnit), 0) << i;
  }
  bool sees() const { return sees_cache(MappedFile(scratch_.path("model.safetensors"))); }
  Scratch scratch_;
};

class Renewed : public OfUnits, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(, Renewed, testing::Bool(), [](const auto& helps) {
  return std::string(helps.param ? "WhereThatHelps" : "WhereItDoesNot");
});

TEST_P(Renewed, UnitsAreReadAnewOnceWithTheSameBytes) {
  const File file = File::open(write());
  SlowPages reader(kUnit, GetParam());
  {
    const OverReader engine(file, {.ram = kUnit + 2 * kPage, .reads = Reads::mapped, .workers = 1},
                            reader);
    for (int pass = 0; pass < 24; ++pass)
      for (int i = 0; i < kUnits; ++i) use(file, engine, i);
  }
  if (!sees()) GTEST_SKIP() << "this system does not say what it caches";
  EXPECT_EQ(reader.whole.size(), GetParam() ? kUnits : 1);
  for (const auto& [offset, times] : reader.whole) EXPECT_EQ(times, 1) << offset;
}

// Maps in no time, as large pages are, and knows who asked for how much.
class QuickPages final : public Reader {
 public:
  std::atomic<bool> fails = false;
  int populate(const MappedFile& /*file*/, std::uint64_t /*at*/, std::uint64_t bytes) override {
    const std::scoped_lock lock(mutex_);
    if (std::this_thread::get_id() == asks_)
      by_asker_ += bytes;
    else
      by_others_ += bytes;
    if (!fails) return 0;  // pages come when they are touched
    errno = EIO;
    return -1;
  }
  ssize_t read(int /*descriptor*/, std::span<const iovec> /*to*/, std::uint64_t /*at*/) override {
    errno = EIO;
    return -1;
  }
  /// Bytes since the last call, by the thread that made this and by others.
  std::pair<std::uint64_t, std::uint64_t> take() {
    const std::scoped_lock lock(mutex_);
    return {std::exchange(by_asker_, 0), std::exchange(by_others_, 0)};
  }

 private:
  const std::thread::id asks_ = std::this_thread::get_id();
  std::uint64_t by_asker_ = 0, by_others_ = 0;
  std::mutex mutex_;
};

using Quick = OfUnits;

TEST_F(Quick, UnitsAreMappedAheadByTheThreadThatUsesOthers) {
  const File file = File::open(write());
  if (!sees()) GTEST_SKIP() << "this system does not say what it caches";
  QuickPages reader;
  const OverReader engine(
      file, {.ram = 2 * kUnit + 4 * kPage, .reads = Reads::mapped, .workers = 1}, reader);
  const auto pass = [&] {
    for (int i = 0; i < kUnits; ++i) use(file, engine, i);
  };
  for (int i = 0; i < 4; ++i) pass();  // they become known
  reader.take();
  const auto hits = engine->report().hits;
  for (int i = 0; i < 4; ++i) pass();
  const auto [by_asker, by_others] = reader.take();
  // Where something comes between while one is timed, it is asked about anew.
  EXPECT_GE(by_asker + by_others, 4 * kUnit);
  EXPECT_LT(by_others, by_asker / 2);
  EXPECT_GE(engine->report().hits + 2, hits + 4 * kUnits);  // they were there when asked for
}

TEST_F(Quick, WhatFailsAheadIsTriedAgainByWhoAsksForItAndTold) {
  const File file = File::open(write());
  if (!sees()) GTEST_SKIP() << "this system does not say what it caches";
  QuickPages reader;
  const OverReader engine(
      file, {.ram = 2 * kUnit + 4 * kPage, .reads = Reads::mapped, .workers = 1}, reader);
  for (int i = 0; i < 12; ++i) use(file, engine, i % kUnits);
  use(file, engine, 0);
  reader.fails = true;
  int failed = 0;
  for (int i = 1; i < 3 * kUnits; ++i) try {
      use(file, engine, i % kUnits);
    } catch (const Error& error) {
      ++failed;
      EXPECT_EQ(error.code(), Code::io);
      EXPECT_NE(std::string(error.what()).find("model.safetensors"), std::string::npos);
    }
  EXPECT_GE(failed, kUnits);
  reader.fails = false;
  for (int i = 0; i < 2 * kUnits; ++i) use(file, engine, i % kUnits);
}

}  // namespace
}  // namespace stowage::engine
