// SPDX-License-Identifier: Apache-2.0
// Mapped and staged files. The failures of each system call are in tests/store/.
#include "base/file.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/file_error.h"
#include "expect_error.h"
#include "scratch.h"

namespace stowage {
namespace {

using test::Scratch;
using testing::ElementsAre;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(MappedFile, MapsAndReads) {
  const Scratch folder;
  const MappedFile file(folder.write("f", "0123456789"));
  EXPECT_EQ(file.size(), 10U);
  EXPECT_EQ(file.identity_now(), file.identity());
  EXPECT_EQ(static_cast<char>(file.data()[7]), '7');
  std::string some(3, ' ');
  file.read(4, std::as_writable_bytes(std::span(some)));
  EXPECT_EQ(some, "456");
}

TEST(MappedFile, AnEmptyFileHasNoMapping) {
  const Scratch folder;
  const MappedFile file(folder.write("f", ""));
  EXPECT_EQ(file.size(), 0U);
  file.drop(0, 0);
  file.read(0, {});
}

TEST(MappedFile, SaysWhereAFileWasCutShort) {
  const Scratch folder;
  const MappedFile file(folder.write("f", "0123456789"));
  std::filesystem::resize_file(folder.path("f"), 6);
  std::string some(8, ' ');
  EXPECT_STOWAGE_ERROR(file.read(2, std::as_writable_bytes(std::span(some))), bad_file,
                       folder.path("f") + ": byte 6: must still be there");
  EXPECT_EQ(file.size(), 10U);
  EXPECT_EQ(file.identity_now().size, 6U);
}

TEST(MappedFile, AMovedOneTakesTheMappingAlong) {
  const Scratch folder;
  MappedFile first(folder.write("f", "abc"));
  const std::byte* const data = first.data();
  const MappedFile second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(static_cast<char>(second.data()[1]), 'b');
}

// A page that cannot be had ends it: the system did look for each.
TEST(MappedFile, PopulatesAnyRangeAndSaysWhatIsGone) {
  const Scratch folder;
  const std::string content(64 * 4096 + 100, 'x');
  const MappedFile file(folder.write("f", content));
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, content.size()}, {1, 4095}, {5000, 0}, {content.size() - 1, 1}}) {
    EXPECT_EQ(file.populate(offset, bytes), 0) << std::strerror(errno);
  }
  std::filesystem::resize_file(folder.path("f"), 4096);
  EXPECT_EQ(file.populate(0, content.size()), -1);
  EXPECT_EQ(errno, EFAULT);
}

// Only whole pages inside the range may go: the neighbours' bytes are theirs.
TEST(MappedFile, DropTakesAnyRange) {
  const Scratch folder;
  const std::string content(3 * 4096 + 100, 'x');
  const MappedFile file(folder.write("f", content));
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, content.size()}, {1, 4095}, {1, 4096}, {4096, 4096}, {5000, 0}, {12388, 0}}) {
    file.drop(offset, bytes);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.data()), content.size()), content);
  }
}

TEST(StagedFile, AppearsOnlyWhenPublished) {
  const Scratch folder;
  StagedFile file(folder.path("f"), 6);
  file.write(3, bytes_of("def"));
  file.write(0, bytes_of("abc"));
  file.sync();
  EXPECT_FALSE(std::filesystem::exists(folder.path("f")));
  file.publish();
  EXPECT_EQ(folder.read("f"), "abcdef");
  EXPECT_THAT(folder.names(), ElementsAre("f"));
}

TEST(StagedFile, LeavesNothingAndTouchesNothingUnpublished) {
  const Scratch folder;
  folder.write("f", "old");
  {
    StagedFile file(folder.path("f"), 1000);
    file.write(0, bytes_of("new"));
    const StagedFile moved = std::move(file);
  }
  EXPECT_EQ(folder.read("f"), "old");
  EXPECT_THAT(folder.names(), ElementsAre("f"));
}

TEST(StagedFile, ReplacesALinkAndNotWhatItPointsAt) {
  const Scratch folder;
  folder.write("blob", "old");
  ASSERT_EQ(::symlink("blob", folder.path("f").c_str()), 0);
  StagedFile file(folder.path("f"), 3);
  file.write(0, bytes_of("new"));
  file.publish();
  EXPECT_EQ(folder.read("blob"), "old");
  EXPECT_EQ(folder.read("f"), "new");
}

TEST(Folder, IsThePartBeforeTheLastSlash) {
  EXPECT_EQ(folder_of("a/b/c"), "a/b");
  EXPECT_EQ(folder_of("c"), ".");
  EXPECT_EQ(folder_of("/c"), "/");
  EXPECT_STOWAGE_ERROR(sync_folder("/no/such"), io, "/no/such: must open as a folder");
}

TEST(Folder, NamesWhatItHas) {
  const Scratch folder;
  folder.write("b", "");
  folder.write(".hidden", "");
  EXPECT_THAT(names_in(folder.path()), testing::UnorderedElementsAre(".", "..", ".hidden", "b"));
  EXPECT_STOWAGE_ERROR((void)names_in(folder.path("none")), io,
                       "none: must be readable, got No such file");
}

TEST(Folder, SpaceIsComparedWithWhatIsFree) {
  const Scratch folder;
  check_space(folder.path(), 1);
  EXPECT_STOWAGE_ERROR(check_space(folder.path(), std::uint64_t{1} << 60), io,
                       "must have 1152921504606846976 bytes of space, got ");
}

TEST(FileError, NamesErrno) {
  errno = EACCES;
  EXPECT_STOWAGE_ERROR(throw_errno("a/b", "must open"), io,
                       "a/b: must open, got Permission denied");
  errno = ENOMEM;
  EXPECT_STOWAGE_ERROR(throw_errno("a/b", "must map"), out_of_memory, "Cannot allocate memory");
}

}  // namespace
}  // namespace stowage
