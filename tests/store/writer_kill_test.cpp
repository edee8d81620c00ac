// SPDX-License-Identifier: Apache-2.0
// Writers that are killed at any moment: the folder then holds one whole model, or none that a
// reader would take for one, and writing again makes it whole and leaves nothing else.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>

#include "expect_error.h"
#include "scratch.h"
#include "store/faults.h"
#include "stowage/writer.h"

namespace stowage::test {
namespace {

constexpr int kTensors = 6;
constexpr std::int64_t kBytes = 40'000;

void write_filled(const std::string& path, char fill, std::uint64_t shard_bytes,
                  bool checksums = true) {
  std::vector<Declaration> tensors;
  for (int i = 0; i < kTensors; ++i)
    tensors.push_back({"t" + std::to_string(i), Dtype::u8, Shape{kBytes}, "", 0});
  WriterOptions options;
  options.shard_bytes = shard_bytes;
  options.checksums = checksums;
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
    EXPECT_THAT(file.verify(), testing::AnyOf(kTensors, 0));  // 0: without checksums
    EXPECT_EQ(file.tensors().size(), std::size_t{kTensors});
    const std::byte found = file.bytes(file.tensors().front())[0];
    for (const TensorInfo& tensor : file.tensors()) {
      const auto bytes = file.bytes(tensor);
      const std::string whole(kBytes, static_cast<char>(found));
      EXPECT_TRUE(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()) ==
                  whole)
          << tensor.name;
    }
    return static_cast<char>(found);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::bad_file) << error.what();
    EXPECT_THAT(error.what(), testing::AnyOf(testing::HasSubstr("[mixed_shards]"),
                                             testing::HasSubstr("[folder_empty]"),
                                             testing::HasSubstr("[index_missing]"),
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

// A form of the model in a folder: how it is written.
struct Form {
  const char* name;
  std::uint64_t shard_bytes;
  bool is_there = true;
};
constexpr Form kNone{"nothing", 0, false}, kOne{"one file", 0}, kSharded{"shards", 90'000},
    kMore{"more shards", 50'000};

// Every moment at which the next system call of a writing is not made any more.
void kill_at_every_call(const Form& old, const Form& next, bool checksums) {
  SCOPED_TRACE(testing::Message() << next.name << " over " << old.name << ", checksums "
                                  << checksums);
  std::set<char> seen;
  for (int nth = 0; nth < 200; ++nth) {
    const Scratch folder;
    const std::string path = folder.path("model.safetensors");
    if (old.is_there) write_filled(path, 'o', old.shard_bytes, checksums);
    const pid_t child = ::fork();
    if (child == 0) {
      die_at(nth);
      write_filled(path, 'n', next.shard_bytes, checksums);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    const char found = fill_of(folder);
    seen.insert(found);
    EXPECT_THAT(found, testing::AnyOf('o', 'n', '\0')) << "killed ahead of call " << nth;
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      EXPECT_EQ(found, 'n');
      EXPECT_THAT(seen, testing::IsSupersetOf({old.is_there ? 'o' : '\0', 'n'}));
      return;
    }
    write_filled(path, 'Z', next.shard_bytes, checksums);
    EXPECT_EQ(fill_of(folder), 'Z') << "written again after call " << nth;
  }
  FAIL() << "a writing has not ended";
}

TEST(WriterKill, BetweenAnyTwoCallsTheFolderIsOldNewOrRefused) {
  const NoDisk no_disk;
  const std::pair<Form, Form> steps[] = {{kNone, kOne},    {kNone, kSharded}, {kOne, kOne},
                                         {kOne, kSharded}, {kSharded, kOne},  {kSharded, kSharded},
                                         {kSharded, kMore}};
  for (const bool checksums : {true, false})
    for (const auto& [old, next] : steps) kill_at_every_call(old, next, checksums);
}

using Content = std::map<std::string, std::string>;  // of a folder, by file

Content content_of(const std::vector<Declaration>& tensors, const std::string& bytes,
                   WriterOptions options) {
  const Scratch folder;
  options.shard_bytes = 90'000;
  Writer writer(folder.path("model.safetensors"), tensors, options);
  for (const Declaration& tensor : tensors)
    writer.write(tensor.name, std::as_bytes(std::span(bytes)));
  writer.finish();
  Content found;
  for (const std::string& name : folder.names()) found[name] = folder.read(name);
  return found;
}

// After a power loss any of the renames may have reached the disk: what the folder then holds is
// one of the two writings, or it is refused. They may differ in anything that a file says.
void check_mixtures(const Content& old, const Content& next) {
  ASSERT_EQ(old.size(), 4U);
  for (unsigned taken = 1; taken + 1 < 1U << old.size(); ++taken) {
    const Scratch folder;
    Content mixed;
    unsigned bit = 0;
    for (const auto& [name, content] : old)
      mixed[name] = (taken >> bit++ & 1U) != 0 ? next.at(name) : content;
    if (mixed == old || mixed == next) continue;
    for (const auto& [name, content] : mixed) folder.write(name, content);
    EXPECT_STOWAGE_ERROR(File::open(folder.path()), bad_file, "[mixed_shards]");
  }
}

TEST(WriterKill, NoMixtureOfTwoWritingsIsTakenForAModel) {
  const NoDisk no_disk;
  std::vector<Declaration> tensors, reshaped, typed;
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = "t" + std::to_string(i);
    tensors.push_back({name, Dtype::i8, Shape{100, 400}, "", 0});
    reshaped.push_back({name, Dtype::i8, Shape{400, 100}, "", 0});
    typed.push_back({name, Dtype::f8_e4m3, Shape{100, 400}, "", 0});
  }
  const std::string bytes(kBytes, 'a'), others(kBytes, 'b');
  WriterOptions plain, described;
  described.metadata["step"] = "2";
  for (const bool checksums : {true, false}) {
    plain.checksums = described.checksums = checksums;
    const Content old = content_of(tensors, bytes, plain);
    EXPECT_EQ(old, content_of(tensors, bytes, plain)) << "the same tensors give the same bytes";
    check_mixtures(old, content_of(tensors, others, plain));
    check_mixtures(old, content_of(reshaped, bytes, plain));
    check_mixtures(old, content_of(typed, bytes, plain));
    check_mixtures(old, content_of(tensors, bytes, described));
  }
}

}  // namespace
}  // namespace stowage::test
