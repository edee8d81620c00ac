// SPDX-License-Identifier: Apache-2.0
// A library that looks like CUDA's driver: copies happen at once, contexts and objects are counted,
// and what would be wrong on a real one (a call without a context) is an error.
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {
__attribute__((visibility("default"))) int fake_contexts = 0, fake_objects = 0, fake_retained = 0;
__attribute__((visibility("default"))) unsigned long long fake_memory = 0;  // allocated last

#define FAKE __attribute__((visibility("default"))) int
constexpr int kNoContext = 201, kInvalid = 1, kOutOfMemory = 2;

FAKE cuInit(unsigned) { return 0; }
FAKE cuGetErrorString(int error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : "made up";
  return 0;
}
FAKE cuDeviceGet(int* device, int index) {
  *device = 7;
  return index == 0 ? 0 : 101;
}
FAKE cuDevicePrimaryCtxRetain(void** context, int device) {
  ++fake_retained;
  *context = &fake_contexts;
  return device == 7 ? 0 : kInvalid;
}
FAKE cuDevicePrimaryCtxRelease_v2(int) {
  --fake_retained;
  return 0;
}
FAKE cuCtxPushCurrent_v2(void* context) {
  ++fake_contexts;
  return context == &fake_contexts ? 0 : kInvalid;
}
FAKE cuCtxPopCurrent_v2(void** context) {
  --fake_contexts;
  *context = nullptr;
  return 0;
}
FAKE cuMemAlloc_v2(unsigned long long* memory, std::size_t bytes) {
  if (fake_contexts == 0) return kNoContext;
  if (bytes > (1u << 20)) return kOutOfMemory;
  ++fake_objects;
  *memory = fake_memory = reinterpret_cast<unsigned long long>(std::malloc(bytes));
  return 0;
}
FAKE cuMemFree_v2(unsigned long long memory) {
  --fake_objects;
  std::free(reinterpret_cast<void*>(memory));
  return fake_contexts == 0 ? kNoContext : 0;
}
void* fake_pinned = nullptr;
FAKE cuMemHostRegister_v2(void* memory, std::size_t, unsigned) {
  if (fake_pinned == memory) return 712;
  fake_pinned = memory;
  ++fake_objects;
  return fake_contexts == 0 ? kNoContext : 0;
}
FAKE cuMemHostUnregister(void*) {
  --fake_objects;
  fake_pinned = nullptr;
  return 0;
}
FAKE cuMemcpyHtoD_v2(unsigned long long to, const void* from, std::size_t bytes) {
  if (fake_contexts == 0) return kNoContext;
  if (bytes == 13) return kInvalid;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
}
