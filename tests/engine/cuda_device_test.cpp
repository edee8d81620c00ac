// SPDX-License-Identifier: Apache-2.0
// What can be known of CUDA without one: the driver is called in the right way (against a library
// that counts), and a machine without it says so.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "expect_error.h"
#include "stowage/device.h"

namespace stowage {
namespace {

constexpr const char* kFake = FAKE_CUDA;

int count(const char* name) {
  void* const library = dlopen(kFake, RTLD_NOW);
  const int value = *static_cast<const int*>(dlsym(library, name));
  dlclose(library);
  return value;
}

TEST(CudaDevice, CallsTheDriverInAContextOfTheDevice) {
  {
    const auto device = make_cuda_device(0, kFake);
    EXPECT_EQ(device->name(), "Fake");
    std::vector<char> host(1000, 'x');
    EXPECT_TRUE(device->pin(host.data(), host.size()));
    EXPECT_FALSE(device->pin(host.data(), host.size()));  // not ours to unpin
    void* const memory = device->allocate(host.size());
    const Device::Event used = device->record(nullptr);
    const Device::Event copied =
        device->copy_in(memory, host.data(), host.size(), std::span(&used, 1));
    EXPECT_GT(copied, used);
    device->wait_on(nullptr, copied);
    device->wait(copied);
    EXPECT_TRUE(device->done(copied));
    EXPECT_TRUE(device->done(0));
    EXPECT_EQ(std::memcmp(memory, host.data(), host.size()), 0);
    device->free(memory);
    device->unpin(host.data());
    EXPECT_EQ(count("fake_contexts"), 0);
    EXPECT_EQ(count("fake_retained"), 1);
  }
  EXPECT_EQ(count("fake_objects"), 0);
  EXPECT_EQ(count("fake_retained"), 0);
}

TEST(CudaDevice, EventsAreUsedAgain) {
  const auto device = make_cuda_device(0, kFake);
  const Device::Event first = device->record(nullptr);
  for (int i = 0; i < 5000; ++i) device->wait(device->record(nullptr));
  EXPECT_TRUE(device->done(first));
  device->wait(first);
  device->wait_on(nullptr, first);
}

TEST(CudaDevice, TellsWhatTheDriverSaid) {
  const auto device = make_cuda_device(0, kFake);
  EXPECT_STOWAGE_ERROR(device->allocate(std::uint64_t{2} << 30), out_of_memory,
                       "cuMemAlloc of 2147483648 bytes must succeed, got error 2: out of memory");
  char host[13] = {};
  void* const memory = device->allocate(13);
  EXPECT_STOWAGE_ERROR(device->copy_in(memory, host, 13, {}), cuda, "got error 1: made up");
  device->free(memory);
  EXPECT_STOWAGE_ERROR(make_cuda_device(3, kFake), cuda, "cuDeviceGet");
}

TEST(CudaDevice, LeavesNothingWhereItCannotBeMade) {
  ::setenv("FAKE_CUDA_NO_EVENTS", "1", 1);
  EXPECT_STOWAGE_ERROR(make_cuda_device(0, kFake), out_of_memory, "cuEventCreate");
  ::unsetenv("FAKE_CUDA_NO_EVENTS");
  EXPECT_EQ(count("fake_objects"), 0);
  EXPECT_EQ(count("fake_retained"), 0);
  EXPECT_EQ(count("fake_contexts"), 0);
}

TEST(CudaDevice, NeedsADriver) {
  EXPECT_STOWAGE_ERROR(make_cuda_device(0, "libno-such-driver.so"), unsupported,
                       "cuda: the driver must be there");
  EXPECT_STOWAGE_ERROR(make_cuda_device(0, "libm.so.6"), unsupported,
                       "cuda: libm.so.6 must have cuInit, got none");
}

}  // namespace
}  // namespace stowage
