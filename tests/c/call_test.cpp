// SPDX-License-Identifier: Apache-2.0
#include "c/call.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "c/handles.h"

namespace stowage::c {
namespace {

template <class Thrown>
stowage_status status_of(const Thrown& thrown) {
  return call("f", [&](const char*) { throw thrown; });
}

TEST(Call, TurnsWhatIsThrownIntoAStatus) {
  EXPECT_EQ(call("f", [](const char* here) { EXPECT_STREQ(here, "f"); }), STOWAGE_OK);
  for (int code = 0; code <= static_cast<int>(Code::out_of_range); ++code) {
    const stowage_status status = status_of(Error(static_cast<Code>(code), "said"));
    EXPECT_EQ(status, 1 + code);
    EXPECT_STREQ(stowage_status_name(status), to_string(static_cast<Code>(code)));
    EXPECT_STREQ(stowage_last_error(), "said");
  }
  EXPECT_EQ(status_of(std::bad_alloc()), STOWAGE_OUT_OF_MEMORY);
  EXPECT_EQ(status_of(std::logic_error("odd")), STOWAGE_DEFECT);
  EXPECT_STREQ(stowage_last_error(), "odd");
  EXPECT_EQ(status_of(7), STOWAGE_DEFECT);
  EXPECT_STREQ(stowage_last_error(), "unknown exception");
}

TEST(Call, EachThreadHasItsLastError) {
  fail(STOWAGE_IO, "mine");
  std::thread([] {
    EXPECT_STREQ(stowage_last_error(), "");
    fail(STOWAGE_IO, "theirs");
  }).join();
  EXPECT_STREQ(stowage_last_error(), "mine");
  EXPECT_EQ(call("f", [](const char*) {}), STOWAGE_OK);
  EXPECT_STREQ(stowage_last_error(), "mine");
}

TEST(Call, LongErrorsEndAtAWholeLetter) {
  for (const std::size_t before : {4092, 4093, 4094, 4095}) {
    const std::string said = std::string(before, 'x') + "€ and more";
    fail(STOWAGE_IO, said.c_str());
    const std::string kept = stowage_last_error();
    EXPECT_EQ(kept, said.substr(0, before + 3 < 4096 ? before + 3 : before));
  }
}

TEST(Call, RefusesTextsBeyondTheDtypes) {
  for (stowage_dtype dtype = STOWAGE_BOOL; dtype <= STOWAGE_C64; ++dtype)
    EXPECT_EQ(c_dtype(checked_dtype("f", "dtype", dtype)), dtype);
  EXPECT_EQ(c_dtype(checked_dtype("f", "dtype", STOWAGE_UNKNOWN, true)), STOWAGE_UNKNOWN);
  for (const stowage_dtype dtype : {-2, -1, 18})
    EXPECT_THROW(checked_dtype("f", "dtype", dtype), Error) << dtype;
}

// A struct of a later header, whose last field this version does not know.
struct Later {
  stowage_writer_options known;
  std::uint64_t added;
};

TEST(Structs, TakeOptionsOfOtherVersions) {
  Later later{{sizeof later, 5, 1}, 0};
  const stowage_writer_options got = taken("f", &later.known, kWriterOptions);
  EXPECT_EQ(got.shard_bytes, 5U);
  EXPECT_EQ(got.no_checksums, 1);
  later.added = 1;
  stowage_writer* writer = nullptr;
  EXPECT_EQ(stowage_writer_new("x.safetensors", &later.known, &writer), STOWAGE_UNSUPPORTED);
  EXPECT_STREQ(stowage_last_error(),
               "stowage_writer_new: options must have no fields that this version lacks, got byte "
               "24");
  later.known.size = kWriterOptions - 1;
  EXPECT_EQ(stowage_writer_new("x.safetensors", &later.known, &writer), STOWAGE_INVALID_ARGUMENT);
  EXPECT_STREQ(stowage_last_error(),
               "stowage_writer_new: options.size must be at least 24, got 23");
  // An earlier header: what it has not is 0, whatever lies behind.
  struct Now {
    std::size_t size;
    std::uint64_t old, added;
  };
  const Now earlier{16, 3, 9};
  EXPECT_EQ(taken("f", &earlier, 16).old, 3U);
  EXPECT_EQ(taken("f", &earlier, 16).added, 0U);
}

TEST(Structs, GiveAsMuchAsTheCallerHas) {
  struct Now {
    std::size_t size;
    std::uint64_t old, added;
  };
  Now earlier{16, 0, 9};
  give("f", "info", &earlier, 16, Now{0, 4, 5});
  EXPECT_EQ(earlier.size, 16U);
  EXPECT_EQ(earlier.old, 4U);
  EXPECT_EQ(earlier.added, 9U);  // not the caller's
  struct {
    Now now;
    std::uint64_t later;
  } later{{sizeof later, 0, 0}, 7};
  give("f", "info", &later.now, 16, Now{0, 4, 5});
  EXPECT_EQ(later.now.size, sizeof later);
  EXPECT_EQ(later.now.added, 5U);
  EXPECT_EQ(later.later, 7U);
  later.now.size = 0;
  EXPECT_THROW(give("f", "info", &later.now, 16, Now{}), Error);
}

}  // namespace
}  // namespace stowage::c
