// SPDX-License-Identifier: Apache-2.0
// Writers that are killed at any moment: the folder then holds one whole model, or none that a
// reader would take for one, and writing again makes it whole and leaves nothing else.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>

#include "expect_error.h"
#include "scratch.h"
#include "store/faults.h"
#include "stowage/writer.h"

namespace stowage::test {
namespace {

constexpr int kTensors = 6;
constexpr std::int64_t kBytes = 40'000;

void write_filled(const std::string& path, char fill, std::uint64_t shard_bytes) {
  std::vector<Declaration> tensors;
  for (int i = 0; i < kTensors; ++i)
    tensors.push_back({"t" + std::to_string(i), Dtype::u8, Shape{kBytes}, "", 0});
  WriterOptions options;
  options.shard_bytes = shard_bytes;
  Writer writer(path, tensors, options);
  const std::string bytes(kBytes, fill);
  for (const Declaration& tensor : tensors)
    writer.write(tensor.name, std::as_bytes(std::span(bytes)));
  writer.finish();
}

// The one byte that all tensors hold; 0 where there is no model. Fails the test on a mixture.
char fill_of(const Scratch& folder) {
  try {
    const File file = File::open(folder.path());
    EXPECT_EQ(file.verify(), kTensors);
    std::set<std::byte> found;
    for (const TensorInfo& tensor : file.tensors())
      found.insert(file.bytes(tensor).begin(), file.bytes(tensor).end());
    EXPECT_EQ(found.size(), 1U);
    return static_cast<char>(*found.begin());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::bad_file) << error.what();
    EXPECT_THAT(error.what(), testing::AnyOf(testing::HasSubstr("[mixed_shards]"),
                                             testing::HasSubstr("[folder_empty]"),
                                             testing::HasSubstr("[folder_ambiguous]")));
    return 0;
  }
}

// A child writes one model after the other until it is killed, `after` microseconds from its first.
void kill_a_writer(const Scratch& folder, std::uint64_t shard_bytes, useconds_t after) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    (void)!::write(ready[1], "", 1);
    for (char fill = 'a';; fill = fill == 'z' ? 'a' : static_cast<char>(fill + 1))
      write_filled(folder.path("m.safetensors"), fill, shard_bytes);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ::usleep(after);
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << status;
  ::close(ready[0]);
  ::close(ready[1]);
}

void kill_writers(std::uint64_t shard_bytes, std::size_t files) {
  const char* const wanted = std::getenv("STOWAGE_KILLS");  // `make test-all` sets 100
  const int count = wanted != nullptr ? std::atoi(wanted) : 10;
  std::mt19937 random(5);
  for (int i = 0; i < count; ++i) {
    const Scratch folder;
    if (i % 2 == 0) write_filled(folder.path("m.safetensors"), 'A', shard_bytes);
    kill_a_writer(folder, shard_bytes, static_cast<useconds_t>(random() % 30'000));
    (void)fill_of(folder);
    write_filled(folder.path("m.safetensors"), 'Z', shard_bytes);
    EXPECT_EQ(fill_of(folder), 'Z') << "killed " << i;
    EXPECT_EQ(folder.names().size(), files) << testing::PrintToString(folder.names());
  }
}

TEST(WriterKill, OneFileIsOldOrNew) { kill_writers(0, 1); }
TEST(WriterKill, ShardsAreWholeOrRebuilt) { kill_writers(90'000, 4); }

TEST(WriterKill, NamedFilesGoToo) {
  const PlainFileSystem plain;
  kill_writers(0, 1);
}

// Two writers at once: neither takes the other's file for one that was left.
TEST(WriterKill, WhatIsBeingWrittenIsLeftAlone) {
  const PlainFileSystem plain;
  const Scratch folder;
  const std::vector<Declaration> tensors = {{"a", Dtype::u8, Shape{3}, "", 0}};
  Writer first(folder.path("m.safetensors"), tensors);
  Writer second(folder.path("m.safetensors"), tensors);
  EXPECT_EQ(folder.names().size(), 2U);
  for (Writer* writer : {&first, &second}) {
    writer->write("a", std::as_bytes(std::span("abc", 3)));
    writer->finish();
  }
  EXPECT_EQ(folder.names(), std::set<std::string>{"m.safetensors"});
}

}  // namespace
}  // namespace stowage::test
