// SPDX-License-Identifier: Apache-2.0
// Programs and streams of a device, against libraries that look like the driver and like NVRTC and
// run the kernels on the host.
#include "device/programs.h"

#include <dlfcn.h>

#include <filesystem>

#include "expect_error.h"
#include "kernel/samples.h"
#include "scratch.h"

namespace stowage::device {
namespace {

using namespace stowage::samples;
using Kind = samples::Kind;
using test::Scratch;

Programs::Where fake(const std::string& folder = "") { return {FAKE_CUDA, {FAKE_CUDA}, folder}; }

int of_fake(const char* name) {
  void* const library = dlopen(FAKE_CUDA, RTLD_NOW);
  const int value = *static_cast<const int*>(dlsym(library, name));
  dlclose(library);
  return value;
}

const Storage kStorage = parse_storage("nf4:block64:nested");
const Shape kShape{6, 96};

Bytes values() {
  return as_type(numbers(Kind::normal, static_cast<std::size_t>(kShape.elements())), Dtype::bf16);
}
// Quantizes and reads back, as a model on a device does.
Bytes there_and_back(Programs& programs) {
  const Bytes from = values();
  Parts parts(kStorage, kShape);
  Bytes working(working_bytes(kStorage, kShape)), out(from.size());
  CudaStream stream(programs, nullptr);
  quantize(stream, from.data(), Dtype::bf16, kShape, kStorage, parts.writable(), working.data());
  EXPECT_LT(stream.read_word(working.data()), 0x7F800000u);
  dequantize(stream, kStorage, kShape, parts.writable(), out.data(), Dtype::bf16);
  return out;
}
Bytes expected() {
  const Parts parts = reference_parts(values(), Dtype::bf16, kShape, kStorage);
  return reference_values(parts.weight(kStorage, kShape), Dtype::bf16);
}

TEST(Programs, RunWhatTheTextsSayInTheContextOfTheDevice) {
  Programs programs(0, fake());
  EXPECT_EQ(programs.architecture(), 90);
  EXPECT_EQ(there_and_back(programs), expected());
  EXPECT_EQ(of_fake("fake_contexts"), 0);
  const int compiled = programs.counts().compiled;
  EXPECT_EQ(compiled, 2);  // a program for what makes weights, and one for what reads them
  EXPECT_EQ(there_and_back(programs), expected());
  EXPECT_EQ(programs.counts().compiled, compiled);
}

TEST(Programs, AreKeptAcrossProcessesAndCompiledAnewWhenTheyAreDamaged) {
  const Scratch scratch;
  const std::string folder = scratch.path("cache/programs");
  Programs first(0, fake(folder));
  EXPECT_EQ(there_and_back(first), expected());
  EXPECT_EQ(first.counts().compiled, 2);
  Programs second(0, fake(folder));
  EXPECT_EQ(there_and_back(second), expected());
  EXPECT_EQ(second.counts().compiled, 0);
  EXPECT_EQ(second.counts().read, 2);
  for (const auto& file : std::filesystem::directory_iterator(folder))
    std::filesystem::resize_file(file.path(), 100);
  Programs third(0, fake(folder));
  EXPECT_EQ(there_and_back(third), expected());
  EXPECT_EQ(third.counts().compiled, 2);
}

TEST(Programs, NeedNoFolderThatCanBeWritten) {
  Programs programs(0, fake("/proc/stowage"));
  EXPECT_EQ(there_and_back(programs), expected());
}

TEST(Programs, SayWhatIsMissing) {
  EXPECT_STOWAGE_ERROR(Programs(0, {"libno_driver.so", {FAKE_CUDA}, ""}), unsupported,
                       "cuda: the driver must be there");
  EXPECT_STOWAGE_ERROR(Programs(0, {FAKE_CUDA, {"libno_a.so", "libno_b.so"}, ""}), unsupported,
                       "cuda: NVRTC must be there, got libno_b.so");
  EXPECT_STOWAGE_ERROR(Programs(1, fake()), cuda, "cuDeviceGet must succeed, got error 101");
}

}  // namespace
}  // namespace stowage::device
