// SPDX-License-Identifier: Apache-2.0
// Mappings whose files lose bytes while they are read, and signals that are none of ours.
#include "base/map_guard.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "expect_error.h"
#include "scratch.h"

namespace stowage {
namespace {

using test::Scratch;

const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

// Another process does it, as it would happen.
void cut(const std::string& path, std::size_t bytes) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::truncate(path.c_str(), static_cast<off_t>(bytes)) == 0 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
}

std::size_t count(const MappedFile& file, char wanted) {
  const auto* const text = reinterpret_cast<const char*>(file.data());
  return static_cast<std::size_t>(std::count(text, text + file.size(), wanted));
}

TEST(MapGuard, LostPagesAreZerosAndMarkTheMapping) {
  const Scratch folder;
  const std::string path = folder.write("f", std::string(8 * kPage + 10, 'x'));
  {
    const MappedFile file(path);
    EXPECT_EQ(count(file, 'x'), file.size());
    EXPECT_FALSE(file.damaged());
    file.check_damage();
    cut(path, 3 * kPage);
    EXPECT_EQ(count(file, 'x'), 3 * kPage);
    EXPECT_EQ(count(file, '\0'), 5 * kPage + 10);
    EXPECT_TRUE(file.damaged());
    EXPECT_EQ(mappings_damaged(), 1U);
    const std::string words = path +
                              ": the file must stay whole while it is open, got one that was "
                              "cut short or could not be read while in use";
    EXPECT_STOWAGE_ERROR(file.check_damage(), bad_file, words);
    EXPECT_STOWAGE_ERROR(check_memory(file.data() + file.size() - 1), bad_file, words);
    file.drop(0, file.size());
    EXPECT_EQ(count(file, '\0'), 5 * kPage + 10);
  }
  EXPECT_EQ(mappings_damaged(), 0U);
}

TEST(MapGuard, OtherMappingsStayWhole) {
  const Scratch folder;
  const std::string path = folder.write("f", std::string(2 * kPage, 'x'));
  const MappedFile good(folder.write("g", std::string(2 * kPage, 'y')));
  const MappedFile bad(path);
  const MappedFile again(path);
  cut(path, 0);
  EXPECT_EQ(count(bad, '\0'), bad.size());
  EXPECT_EQ(count(good, 'y'), good.size());
  EXPECT_TRUE(bad.damaged());
  EXPECT_FALSE(good.damaged());
  EXPECT_FALSE(again.damaged());  // nobody has read from it yet
  const int local = 0;
  check_memory(good.data());
  check_memory(again.data());
  check_memory(&local);
  check_memory(nullptr);
  EXPECT_EQ(count(again, '\0'), again.size());
  EXPECT_EQ(mappings_damaged(), 2U);
}

TEST(MapGuard, AMovedMappingIsStillWatched) {
  const Scratch folder;
  const std::string path = folder.write("f", std::string(2 * kPage, 'x'));
  std::vector<MappedFile> files;
  for (int i = 0; i < 20; ++i) files.emplace_back(path);  // moves them as it grows
  cut(path, kPage);
  for (const MappedFile& file : files) {
    EXPECT_EQ(count(file, '\0'), kPage);
    EXPECT_STOWAGE_ERROR(file.check_damage(), bad_file, path);
  }
}

// An address that is mapped again belongs to the new mapping, also where the old one was damaged.
TEST(MapGuard, AClosedMappingIsForgotten) {
  const Scratch folder;
  const std::string path = folder.write("f", std::string(64 * kPage, 'x'));
  for (int i = 0; i < 100; ++i) {
    folder.write("f", std::string(64 * kPage, 'x'));
    const MappedFile file(path);
    ASSERT_FALSE(file.damaged());
    ASSERT_EQ(count(file, 'x'), file.size());
    ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(kPage)), 0);
    ASSERT_EQ(count(file, 'x'), kPage);
    ASSERT_TRUE(file.damaged());
    ASSERT_EQ(mappings_damaged(), 1U);
  }
  EXPECT_EQ(mappings_damaged(), 0U);
}

TEST(MapGuard, ThreadsLoseOneMappingTogether) {
  const Scratch folder;
  constexpr std::size_t kPages = 256, kThreads = 8;
  for (int round = 0; round < 20; ++round) {
    const std::string path = folder.write("f", std::string(kPages * kPage, 'x'));
    const MappedFile file(path);
    std::atomic<bool> go{false};
    std::atomic<std::size_t> wrong{0};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        while (!go) std::this_thread::yield();
        for (std::size_t i = 0; i < kPages; ++i) {
          const std::size_t page = (i * (2 * t + 1)) % kPages;
          const auto byte = static_cast<char>(file.data()[page * kPage]);
          if (byte != (page < kPages / 2 ? 'x' : '\0')) ++wrong;
        }
        if (!file.damaged() || mappings_damaged() == 0) ++wrong;
      });
    }
    cut(path, kPages / 2 * kPage);
    go = true;
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(wrong, 0U);
    ASSERT_EQ(mappings_damaged(), 1U);
  }
}

// Some come and go while others are lost: no mark lands on the wrong one.
TEST(MapGuard, ThreadsOpenAndCloseMeanwhile) {
  const Scratch folder;
  const std::string path = folder.write("good", std::string(4 * kPage, 'y'));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, opened{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        const MappedFile file(path);
        if (count(file, 'y') != file.size() || file.damaged()) ++wrong;
        ++opened;
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    const std::string bad = folder.write("bad", std::string(4 * kPage, 'x'));
    const MappedFile file(bad);
    ASSERT_EQ(::truncate(bad.c_str(), 0), 0);
    if (count(file, '\0') != file.size() || !file.damaged()) ++wrong;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(opened, 0);
  EXPECT_EQ(mappings_damaged(), 0U);
}

TEST(MapGuard, AFullTableRefusesOneMore) {
  const Scratch folder;
  const std::string path = folder.write("f", "content");
  std::vector<std::unique_ptr<MapGuard>> guards;
  const auto fill = [&] {
    while (guards.size() <= kMostMappings) {
      guards.push_back(std::make_unique<MapGuard>(&path, 1, "held"));
    }
  };
  EXPECT_STOWAGE_ERROR(fill(), io, "held: at most 16384 files must be mapped at a time");
  EXPECT_STOWAGE_ERROR(MappedFile{path}, io, path + ": at most 16384 files");
  guards.pop_back();
  const MappedFile file(path);
  EXPECT_EQ(count(file, 'c'), 1U);
}

// What follows runs in processes of their own: they end by the signal, or change its handler.

char* foreign_hole() {
  std::string name = testing::TempDir() + "stowage-hole-XXXXXX";
  const int fd = ::mkstemp(name.data());
  ::unlink(name.c_str());
  if (::ftruncate(fd, static_cast<off_t>(kPage)) != 0) ::_exit(99);
  void* const map = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (::ftruncate(fd, 0) != 0) ::_exit(99);
  return static_cast<char*>(map);
}

void touch(const char* memory) { (void)*static_cast<const volatile char*>(memory); }

char* expected_address = nullptr;

void with_facts(int number, siginfo_t* info, void*) {
  ::_exit(number == SIGBUS && info->si_addr == expected_address ? 42 : 43);
}
void without_facts(int number) { ::_exit(number == SIGBUS ? 44 : 45); }

void set_handler(void (*plain)(int), void (*full)(int, siginfo_t*, void*)) {
  struct sigaction action {};
  if (full != nullptr) {
    action.sa_sigaction = full;
    action.sa_flags = SA_SIGINFO;
  } else {
    action.sa_handler = plain;
  }
  ::sigaction(SIGBUS, &action, nullptr);
}

class ForeignSignal : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  // A mapping of ours is open, and one was lost: the handler is in place and at work.
  void watch() {
    file_ = std::make_unique<MappedFile>(folder_.write("f", std::string(2 * kPage, 'x')));
    std::filesystem::resize_file(folder_.path("f"), kPage);
    if (count(*file_, '\0') != kPage || !file_->damaged()) ::_exit(98);
    std::filesystem::remove_all(folder_.path());  // nobody does it after a signal
  }
  Scratch folder_;
  std::unique_ptr<MappedFile> file_;
};

TEST_F(ForeignSignal, GoesToTheHandlerBeforeWithItsFacts) {
  const auto body = [&] {
    set_handler(nullptr, with_facts);
    watch();
    touch(expected_address = foreign_hole());
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(42), "");
}

TEST_F(ForeignSignal, GoesToAPlainHandlerBefore) {
  const auto body = [&] {
    set_handler(without_facts, nullptr);
    watch();
    touch(foreign_hole());
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(44), "");
}

TEST_F(ForeignSignal, EndsTheProcessWithoutOne) {
  const auto by_access = [&](void (*handler)(int)) {
    set_handler(handler, nullptr);
    watch();
    touch(foreign_hole());
    ::_exit(97);
  };
  const auto by_kill = [&] {
    set_handler(SIG_DFL, nullptr);
    watch();
    ::kill(::getpid(), SIGBUS);
    ::_exit(97);
  };
  EXPECT_EXIT(by_access(SIG_DFL), testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(by_access(SIG_IGN), testing::KilledBySignal(SIGBUS), "");  // as the kernel has it
  EXPECT_EXIT(by_kill(), testing::KilledBySignal(SIGBUS), "");
}

TEST_F(ForeignSignal, IsIgnoredIfSentToOneWhoIgnoresIt) {
  const auto body = [&] {
    set_handler(SIG_IGN, nullptr);
    watch();
    ::kill(::getpid(), SIGBUS);
    ::_exit(0);
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(0), "");
}

// Bytes of ours that were closed are nobody's.
TEST_F(ForeignSignal, IsThatOfAMappingThatWasClosed) {
  const auto body = [&] {
    set_handler(without_facts, nullptr);
    watch();
    char* const hole = foreign_hole();
    { const MapGuard guard(hole, kPage, "hole"); }
    touch(hole);
    ::_exit(97);
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(44), "");
}

}  // namespace
}  // namespace stowage
