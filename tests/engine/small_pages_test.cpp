// SPDX-License-Identifier: Apache-2.0
// Units that lie in the page cache in small pages: which of them leave it and when, by times that
// the test tells, and that an engine reads those anew, whole and once, with the same bytes.
#include "engine/small_pages.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <map>

#include "base/residency.h"
#include "engine/faulty_reader.h"
#include "engine/model.h"

namespace stowage::engine {
namespace {

using namespace test;

constexpr std::uint64_t kBytes = std::uint64_t{16} << 20;
constexpr double kSmall = 0.2e-6, kLarge = 0.002e-6;  // seconds of a page

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
  EXPECT_TRUE(leaves_after_visits(3, 4));
  for (int i = 0; i < 8; ++i) EXPECT_FALSE(visit(5, kSmall));  // while the first is tried
  come_back(3);
  EXPECT_FALSE(visit(3, kSmall, 0.5));  // half came from the disk: says nothing
  EXPECT_FALSE(visit(3, kSmall / 4));   // some pages stayed as they were
  EXPECT_TRUE(visit(5, kSmall));
  come_back(5);
  EXPECT_FALSE(leaves_after_visits(3, 9));  // once
  EXPECT_FALSE(leaves_after_visits(5, 9));
}

TEST_F(Visits, NoneFollowsWhereItDidNotHelp) {
  EXPECT_TRUE(leaves_after_visits(0, 4));
  come_back(0);
  for (int i = 0; i < 8; ++i) EXPECT_FALSE(visit(0, kSmall));
  EXPECT_FALSE(leaves_after_visits(1, 9));
  EXPECT_FALSE(pages_.is_asked(1, kBytes));
}

TEST_F(Visits, SlowOnesCountOneAfterTheOtherAndAQuickOneEndsIt) {
  EXPECT_FALSE(leaves_after_visits(0, 3));
  EXPECT_FALSE(visit(0, kLarge));
  EXPECT_FALSE(pages_.is_asked(0, kBytes));
  EXPECT_FALSE(leaves_after_visits(0, 9));
  EXPECT_FALSE(pages_.is_asked(1, std::uint64_t{1} << 20));  // too small for large pages
  EXPECT_FALSE(pages_.leaves(2, kBytes));                    // of which nothing was noted
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

class Renewed : public testing::TestWithParam<bool> {
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
  Scratch scratch_;
};
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
      for (int i = 0; i < kUnits; ++i) {
        const auto found = std::ranges::find(engine->units(), weight_name(i), &Unit::name);
        const auto lease = engine->acquire(static_cast<WeightId>(found - engine->units().begin()));
        const std::vector<std::uint8_t> wanted = bytes_of(i);
        const auto* mapped = file.bytes(*file.find(weight_name(i))).data();
        ASSERT_EQ(std::memcmp(lease.at(mapped), wanted.data(), kUnit), 0) << pass << i;
      }
  }
  if (!sees_cache(MappedFile(scratch_.path("model.safetensors"))))
    GTEST_SKIP() << "this system does not say what it caches";
  EXPECT_EQ(reader.whole.size(), GetParam() ? kUnits : 1);
  for (const auto& [offset, times] : reader.whole) EXPECT_EQ(times, 1) << offset;
}

}  // namespace
}  // namespace stowage::engine
