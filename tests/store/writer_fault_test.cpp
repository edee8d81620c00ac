// SPDX-License-Identifier: Apache-2.0
// Every system call of a writing fails once: the folder must then hold what it held before.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <map>
#include <thread>

#include "expect_error.h"
#include "scratch.h"
#include "store/faults.h"
#include "stowage/writer.h"

namespace stowage::test {
namespace {

using testing::HasSubstr;

std::map<std::string, std::string> contents(const Scratch& folder) {
  std::map<std::string, std::string> found;
  for (const std::string& name : folder.names()) found[name] = folder.read(name);
  return found;
}

std::vector<Declaration> two_tensors() {
  return {{.name = "a", .dtype = Dtype::u8, .shape = {5000}, .dtype_name = {}},
          {.name = "b", .dtype = Dtype::u8, .shape = {3000}, .dtype_name = {}}};
}

void write_model(const Scratch& folder, char fill, std::uint64_t shard_bytes) {
  WriterOptions options;
  options.shard_bytes = shard_bytes;
  Writer writer(folder.path("m.safetensors"), two_tensors(), options);
  const std::string a(5000, fill), b(3000, fill);
  writer.write("a", std::as_bytes(std::span(a)));
  writer.write("b", std::as_bytes(std::span(b)));
  writer.finish();
}

// Lets call after call fail until a writing gets through; returns how many calls can fail.
int fail_each_call(const Scratch& folder, int error, std::uint64_t shard_bytes) {
  const auto before = contents(folder);
  for (int nth = 0;; ++nth) {
    const Fault fault(nth, error);
    try {
      write_model(folder, 'n', shard_bytes);
      EXPECT_EQ(Fault::failed(), "");
      return nth;
    } catch (const Error& caught) {
      EXPECT_EQ(caught.code(), Code::io) << caught.what();
      EXPECT_THAT(caught.what(), HasSubstr(folder.path()));
      EXPECT_EQ(contents(folder), before) << Fault::failed() << " " << nth << ": " << caught.what();
    }
  }
}

TEST(WriterFault, AFullDiskIsNoticedBeforeAnythingIsMade) {
  const Scratch folder;
  constexpr std::int64_t kPetabyte = std::int64_t{1} << 50;
  const Fault none(-1, 0);
  for (const std::uint64_t shard_bytes : {std::uint64_t{1} << 40, std::uint64_t{1} << 60}) {
    WriterOptions options;
    options.shard_bytes = shard_bytes;
    const std::vector<Declaration> large{
        {.name = "a", .dtype = Dtype::u8, .shape = {kPetabyte}, .dtype_name = {}}};
    EXPECT_STOWAGE_ERROR(Writer(folder.path("m.safetensors"), large, options), io,
                         "bytes of space, got ");
  }
  EXPECT_EQ(Fault::calls(), 0);
  EXPECT_TRUE(folder.names().empty());
}

TEST(WriterFault, ANewFileLeavesNothingWhenAnyCallFails) {
  for (const int error : {ENOSPC, EIO}) {
    const Scratch folder;
    EXPECT_EQ(fail_each_call(folder, error, 0), 9);
    EXPECT_EQ(File::open(folder.path()).verify(), 2);
  }
}

TEST(WriterFault, NewShardsLeaveNothingWhenAnyCallFails) {
  const Scratch folder;
  EXPECT_GT(fail_each_call(folder, EIO, 4000), 15);
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
}

// Until a name is on the disk, the next step does not count on it.
TEST(WriterFault, EveryRenameAndUnlinkIsSyncedBeforeTheWritingEnds) {
  for (const std::uint64_t shard_bytes : {0, 4000}) {
    const Scratch folder;
    write_model(folder, 'o', 4000 - shard_bytes);  // the other form, which goes
    const Fault none(-1, 0);
    write_model(folder, 'n', shard_bytes);
    const std::vector<std::string> log = Fault::log();
    EXPECT_THAT(log, testing::Contains("rename"));
    EXPECT_THAT(log, testing::Contains("unlink"));
    EXPECT_EQ(log.back(), "fsync");
    const auto unlinked = std::ranges::find(log, "unlink");
    EXPECT_EQ(*(unlinked - 1), "fsync") << "the new form is on the disk before the old one goes";
    EXPECT_EQ(std::count(log.begin(), log.end(), "unlink"), 1);
  }
}

// The other form that cannot be taken away: the old model stays, and the new one goes.
TEST(WriterFault, AnOtherFormThatStaysIsAnError) {
  for (const std::uint64_t shard_bytes : {0, 4000}) {
    const Scratch folder;
    write_model(folder, 'o', 4000 - shard_bytes);
    const auto before = contents(folder);
    int calls = 0;
    {
      const Scratch dry;
      write_model(dry, 'o', 4000 - shard_bytes);
      const Fault none(-1, 0);
      write_model(dry, 'n', shard_bytes);
      calls = Fault::calls();
    }
    const Fault fault(calls - 2, EPERM);
    EXPECT_STOWAGE_ERROR(write_model(folder, 'n', shard_bytes), io, "holds two models");
    EXPECT_EQ(Fault::failed(), "unlink");
    EXPECT_EQ(contents(folder), before);
  }
}

// The only call after the new file has its name is the folder's fsync: then the new one is there.
TEST(WriterFault, AnOldFileStaysWholeUntilTheNewOneHasItsName) {
  const Scratch folder;
  write_model(folder, 'o', 0);
  const auto before = contents(folder);
  for (int nth = 0; nth < 7; ++nth) {
    const Fault fault(nth, EIO);
    EXPECT_THROW(write_model(folder, 'n', 0), Error);
    EXPECT_EQ(contents(folder), before) << Fault::failed();
  }
  const Fault fault(7, EIO);
  EXPECT_THROW(write_model(folder, 'n', 0), Error);
  EXPECT_EQ(Fault::failed(), "fsync");
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
}

// New shards beside old ones of the same names: no reader takes the mixture for a model.
TEST(WriterFault, AMixtureOfOldAndNewShardsIsRefused) {
  const Scratch folder;
  write_model(folder, 'o', 4000);
  int mixed = 0;
  for (int nth = 0; nth < 40; ++nth) {
    {
      const Fault fault(nth, EIO);
      try {
        write_model(folder, 'n', 4000);
        break;
      } catch (const Error&) {
      }
    }
    try {
      EXPECT_EQ(File::open(folder.path()).verify(), 2);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("[mixed_shards]"));
      ++mixed;
    }
    write_model(folder, 'o', 4000);
    EXPECT_EQ(File::open(folder.path()).verify(), 2);
  }
  EXPECT_GT(mixed, 0);
}

TEST(WriterFault, WorksWithoutNamelessFilesAndReservation) {
  const PlainFileSystem plain;
  const Scratch folder;
  {
    Writer writer(folder.path("m.safetensors"), two_tensors());
    ASSERT_EQ(folder.names().size(), 1U);
    EXPECT_THAT(*folder.names().begin(), testing::MatchesRegex("\\.m\\.safetensors\\..*\\.tmp"));
  }
  EXPECT_TRUE(folder.names().empty());
  fail_each_call(folder, ENOSPC, 0);
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
}

TEST(WriterFault, ALockThatIsLostToAnotherWriterCostsNothing) {
  const PlainFileSystem plain;
  const StolenLock lock;
  const Scratch folder;
  write_model(folder, 'n', 0);
  EXPECT_TRUE(StolenLock::happened());
  EXPECT_EQ(folder.names(), std::set<std::string>{"m.safetensors"});
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
}

// Each takes away what killed writers have left; none takes what another has just begun.
TEST(WriterFault, SeveralWritersOfOneTargetAllFinish) {
  const PlainFileSystem plain;
  const Scratch folder;
  std::atomic<int> failed = 0;
  {
    std::vector<std::jthread> writers;
    for (const char fill : {'a', 'b', 'c'})
      writers.emplace_back([&, fill] {
        for (int round = 0; round < 40; ++round) {
          try {
            write_model(folder, fill, 0);
          } catch (const Error&) {
            ++failed;
          }
        }
      });
  }
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(folder.names(), std::set<std::string>{"m.safetensors"});
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
}

TEST(WriterFault, InterruptedAndShortTransfersAreFinished) {
  const SmallSteps steps(7);
  const Scratch folder;
  write_model(folder, 's', 0);
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
}

// The real thing: the kernel refuses to let files grow.
TEST(WriterFault, AFileSizeLimitIsAnErrorThatLeavesNothing) {
  const Scratch folder;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  rlimit low = old;
  low.rlim_cur = 6000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  EXPECT_STOWAGE_ERROR(write_model(folder, 'x', 0), io, "File too large");
  EXPECT_TRUE(folder.names().empty());
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, old_handler);
}

}  // namespace
}  // namespace stowage::test
