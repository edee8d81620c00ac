// SPDX-License-Identifier: Apache-2.0
// A library that looks like CUDA's driver and like NVRTC: memory is the host's, copies happen at
// once, kernels are those of the texts, compiled for the host; contexts and objects are counted,
// and what would be wrong on a real one (a call without a context) is an error. What it compiles is
// the text of a program, and what it loads is the form that the text says.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "device/host_kernels.h"

namespace {
template <class T>
T* kept(T made) {  // as long as the process, as on a device
  static std::mutex mutex;
  static std::deque<T> all;
  const std::lock_guard lock(mutex);
  return &all.emplace_back(std::move(made));
}
}  // namespace

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

// --- programs, and what runs on a stream ---------------------------------------------------------

struct Function {
  stowage::cuda::Form form;
  std::string kernel;
};

FAKE cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
FAKE cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : 2;
  return device == 7 ? 0 : kInvalid;
}
FAKE cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t bytes, void*) {
  if (fake_contexts == 0) return kNoContext;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
FAKE cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, std::size_t bytes,
                          void* stream) {
  return cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to), from, bytes, stream);
}
FAKE cuMemsetD8Async(unsigned long long to, unsigned char byte, std::size_t bytes, void*) {
  if (fake_contexts == 0) return kNoContext;
  std::memset(reinterpret_cast<void*>(to), byte, bytes);
  return 0;
}
FAKE cuStreamSynchronize(void*) { return fake_contexts == 0 ? kNoContext : 0; }

FAKE cuModuleLoadData(void** module, const void* code) {
  if (fake_contexts == 0) return kNoContext;
  const std::string text(static_cast<const char*>(code));
  const std::size_t at = text.find("constexpr Form form{");
  if (at == std::string::npos) return 209;  // no image for the device
  stowage::cuda::Form form{};
  const char* next = text.c_str() + at + 20;
  const auto number = [&next] {  // skips names, braces and what ends a number
    while (std::strchr("+-0123456789", *next) == nullptr) {
      if (std::strncmp(next, "true", 4) == 0) return next += 4, 1.0f;
      if (std::strncmp(next, "false", 5) == 0) return next += 5, 0.0f;
      while (std::isalpha(*next) != 0) ++next;
      if (std::strchr("+-0123456789", *next) == nullptr) ++next;
    }
    char* end = nullptr;
    const float made = std::strtof(next, &end);
    next = end + (*end == 'f' ? 1 : 0);
    return made;
  };
  const auto take = [&number](auto&... fields) {
    const auto one = [&number]<class Field>(Field& field) {
      field = static_cast<Field>(static_cast<int>(number()));
    };
    (one(fields), ...);
  };
  take(form.values, form.x_rows, form.many, form.groups, form.element, form.bits, form.together,
       form.bias, form.packing, form.group, form.n, form.m, form.scales, form.number, form.record,
       form.inner, form.zeros, form.outer_n);
  form.factor = number();
  take(form.transposed, form.codec, form.whole, form.slabs, form.floors);
  form.least = number(), form.most = number(), form.divisor = number(), form.largest = number();
  for (float& x : form.values16) x = number();
  for (float& x : form.thresholds) x = number();
  for (int& x : form.order) x = static_cast<int>(number());
  for (std::uint16_t& x : form.halves) x = static_cast<std::uint16_t>(number());
  *module = kept(form);
  return 0;
}
FAKE cuModuleGetFunction(void** function, void* module, const char* name) {
  if (!stowage::cuda::on_host::has_kernel(name)) return 500;
  *function = kept(Function{*static_cast<stowage::cuda::Form*>(module), name});
  return 0;
}
__attribute__((visibility("default"))) int fake_launches = 0;
FAKE cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                    unsigned, unsigned, void*, void** arguments, void**) {
  if (fake_contexts == 0) return kNoContext;
  const auto& made = *static_cast<Function*>(function);
  stowage::cuda::on_host::run_kernel(made.form, made.kernel, arguments, blocks, threads);
  ++fake_launches;
  return 0;
}

// --- NVRTC ---------------------------------------------------------------------------------------

__attribute__((visibility("default"))) int fake_compiled = 0;
struct Program {
  std::string text;
};
__attribute__((visibility("default"))) const char* nvrtcGetErrorString(int) { return "made up"; }
FAKE nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 0;
  return 0;
}
FAKE nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return 0;
}
FAKE nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 75, archs[1] = 90;
  return 0;
}
FAKE nvrtcCreateProgram(void** program, const char* text, const char*, int, const char* const*,
                        const char* const*) {
  *program = new Program{text};
  return 0;
}
FAKE nvrtcCompileProgram(void*, int, const char* const*) {
  ++fake_compiled;
  return 0;
}
FAKE nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  return 0;
}
FAKE nvrtcGetProgramLogSize(void*, std::size_t* size) {
  *size = 1;
  return 0;
}
FAKE nvrtcGetProgramLog(void*, char* log) {
  *log = '\0';
  return 0;
}
FAKE nvrtcGetCUBINSize(void* program, std::size_t* size) {
  *size = static_cast<Program*>(program)->text.size() + 1;
  return 0;
}
FAKE nvrtcGetCUBIN(void* program, char* code) {
  std::strcpy(code, static_cast<Program*>(program)->text.c_str());
  return 0;
}
FAKE nvrtcGetPTXSize(void* program, std::size_t* size) { return nvrtcGetCUBINSize(program, size); }
FAKE nvrtcGetPTX(void* program, char* code) { return nvrtcGetCUBIN(program, code); }
}
