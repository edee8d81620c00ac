// SPDX-License-Identifier: Apache-2.0
// What can be known of CUDA without one: the driver is called in the right way (against a library
// that counts), and a machine without it says so.
#include "device/cuda.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "expect_error.h"

namespace stowage::device {
namespace {

constexpr const char* kFake = FAKE_CUDA;

template <class Value>
Value of_fake(const char* name) {
  void* const library = dlopen(kFake, RTLD_NOW);
  const Value value = *static_cast<const Value*>(dlsym(library, name));
  dlclose(library);
  return value;
}

// Pinned and allocated memory, contexts that are current, devices that are held.
void expect_left(int objects, int contexts, int retained) {
  EXPECT_EQ(of_fake<int>("fake_objects"), objects);
  EXPECT_EQ(of_fake<int>("fake_contexts"), contexts);
  EXPECT_EQ(of_fake<int>("fake_retained"), retained);
}

TEST(CudaCopy, CallsTheDriverInAContextOfTheDevice) {
  std::vector<std::byte> host(1000, std::byte{'x'});
  {
    CudaCopy copy(0, host, kFake);
    expect_left(2, 0, 1);
    copy.run();
    EXPECT_EQ(std::memcmp(reinterpret_cast<void*>(of_fake<unsigned long long>("fake_memory")),
                          host.data(), host.size()),
              0);
    {
      CudaCopy again(0, host, kFake);  // what is pinned already is not ours to unpin
      expect_left(3, 0, 2);
    }
    expect_left(2, 0, 1);
  }
  expect_left(0, 0, 0);
}

TEST(CudaCopy, TellsWhatTheDriverSaidAndLeavesNothing) {
  std::vector<std::byte> large(2 << 20);
  EXPECT_STOWAGE_ERROR(CudaCopy(0, large, kFake), out_of_memory,
                       "cuMemAlloc of 2097152 bytes must succeed, got error 2: out of memory");
  expect_left(0, 0, 0);
  std::vector<std::byte> odd(13);
  EXPECT_STOWAGE_ERROR(CudaCopy(0, odd, kFake).run(), cuda,
                       "cuMemcpyHtoD of 13 bytes must succeed, got error 1: made up");
  expect_left(0, 0, 0);
  EXPECT_STOWAGE_ERROR(CudaCopy(3, odd, kFake), cuda, "cuDeviceGet");
}

// A child asks its parent's device for nothing, and lets go of nothing there.
TEST(CudaCopy, IsOfNoUseInAForkedChild) {
  std::vector<std::byte> host(16);
  auto copy = std::make_unique<CudaCopy>(0, host, kFake);
  const pid_t child = ::fork();
  if (child == 0) {
    EXPECT_STOWAGE_ERROR(copy->run(), unsupported,
                         "cuda: a device must be used by the process that started it");
    copy.reset();
    expect_left(2, 0, 1);
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  copy->run();
}

TEST(CudaCopy, NeedsADriver) {
  std::vector<std::byte> host(16);
  EXPECT_STOWAGE_ERROR(CudaCopy(0, host, "libno-such-driver.so"), unsupported,
                       "cuda: the driver must be there");
  EXPECT_STOWAGE_ERROR(CudaCopy(0, host, "libm.so.6"), unsupported,
                       "cuda: the driver: libm.so.6 must have cuInit, got none");
}

}  // namespace
}  // namespace stowage::device
