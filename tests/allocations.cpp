// SPDX-License-Identifier: Apache-2.0
#include "allocations.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <string_view>

namespace stowage::test {
namespace {

std::atomic<std::uint64_t> calls{0}, advice{0};
std::atomic<std::int64_t> live{0};
std::atomic<bool> short_of{false};
std::atomic<std::int64_t> asked{0}, nth_fails{-1};
std::atomic<const char*> what{""}, only{nullptr};

[[maybe_unused]] bool fails(const char* call) {
  if (!short_of.load(std::memory_order_relaxed)) return false;
  const char* const name = only;
  if (name != nullptr && std::string_view(name) != call) return false;
  if (asked.fetch_add(1) != nth_fails) return false;
  what = call;
  return true;
}

[[maybe_unused]] int refuse(int number) {
  errno = number;
  return -1;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

std::uint64_t allocations() { return calls.load(); }
std::int64_t held() { return live.load(); }
std::uint64_t madvised() { return advice.load(); }

Shortage::Shortage(std::int64_t nth, const char* of) {
  what = "";
  only = of;
  asked = 0;
  nth_fails = nth;
  short_of = true;
}
Shortage::~Shortage() { short_of = false; }
std::string Shortage::failed() { return what.load(); }

}  // namespace stowage::test

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
using stowage::test::calls, stowage::test::live, stowage::test::advice;
using stowage::test::fails, stowage::test::real, stowage::test::refuse;

// The C library's own functions under its own names; operator new ends here too.
#define SEEN __attribute__((visibility("default")))
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
void __libc_free(void* memory);

static void* counted(void* memory) {
  calls.fetch_add(1, std::memory_order_relaxed);
  if (memory != nullptr) live.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
static void* none(const char*) {
  errno = ENOMEM;
  return nullptr;
}

SEEN void* malloc(std::size_t bytes) {
  return fails("malloc") ? none("malloc") : counted(__libc_malloc(bytes));
}
SEEN void* calloc(std::size_t count, std::size_t bytes) {
  return fails("calloc") ? none("calloc") : counted(__libc_calloc(count, bytes));
}
SEEN void* realloc(void* memory, std::size_t bytes) {
  if (fails("realloc")) return none("realloc");
  void* const made = __libc_realloc(memory, bytes);
  if (memory != nullptr && made != nullptr) {
    calls.fetch_add(1, std::memory_order_relaxed);
    return made;
  }
  return counted(made);
}
SEEN void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return fails("aligned_alloc") ? none("aligned_alloc")
                                : counted(__libc_memalign(alignment, bytes));
}
SEEN void free(void* memory) {
  if (memory != nullptr) live.fetch_sub(1, std::memory_order_relaxed);
  __libc_free(memory);
}

SEEN int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                        void* argument) {
  if (fails("pthread_create")) return EAGAIN;
  using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  return real<Create>("pthread_create")(thread, attributes, body, argument);
}
SEEN void* mmap(void* at, std::size_t bytes, int access, int flags, int fd, off_t offset) {
  if (fails("mmap")) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  using Map = void*(void*, std::size_t, int, int, int, off_t);
  void* const made = real<Map>("mmap")(at, bytes, access, flags, fd, offset);
  if (made != MAP_FAILED) live.fetch_add(1);
  return made;
}
SEEN int munmap(void* at, std::size_t bytes) {
  live.fetch_sub(1);
  return real<int(void*, std::size_t)>("munmap")(at, bytes);
}
SEEN int madvise(void* at, std::size_t bytes, int kind) {
  advice.fetch_add(1);
  return fails("madvise") ? refuse(ENOMEM)
                          : real<int(void*, std::size_t, int)>("madvise")(at, bytes, kind);
}
SEEN int mincore(void* at, std::size_t bytes, unsigned char* pages) {
  return fails("mincore")
             ? refuse(EAGAIN)
             : real<int(void*, std::size_t, unsigned char*)>("mincore")(at, bytes, pages);
}
SEEN int fstat(int fd, struct stat* status) noexcept {
  return fails("fstat") ? refuse(EIO) : real<int(int, struct stat*)>("fstat")(fd, status);
}
SEEN ssize_t preadv(int fd, const iovec* to, int count, off_t offset) {
  return fails("preadv")
             ? refuse(EIO)
             : real<ssize_t(int, const iovec*, int, off_t)>("preadv")(fd, to, count, offset);
}
SEEN int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    std::va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return fails("open") ? refuse(EMFILE)
                       : real<int(const char*, int, ...)>("open")(path, flags, mode);
}
}  // extern "C"
#endif
