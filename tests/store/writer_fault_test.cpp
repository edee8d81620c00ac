// SPDX-License-Identifier: Apache-2.0
// Every system call of a writing fails once: the folder must then hold what it held before.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <map>

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

TEST(WriterFault, ANewFileLeavesNothingWhenAnyCallFails) {
  for (const int error : {ENOSPC, EIO}) {
    const Scratch folder;
    EXPECT_EQ(fail_each_call(folder, error, 0), 8);
    EXPECT_EQ(File::open(folder.path()).verify(), 2);
  }
}

TEST(WriterFault, NewShardsLeaveNothingWhenAnyCallFails) {
  const Scratch folder;
  EXPECT_GT(fail_each_call(folder, EIO, 4000), 15);
  EXPECT_EQ(File::open(folder.path()).verify(), 2);
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
