// SPDX-License-Identifier: Apache-2.0
#include "engine/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "base/file_error.h"
#include "stowage/error.h"

namespace stowage::engine {
namespace {
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif

// Between any two taken runs lies at most one free one.
constexpr std::size_t blocks_for(std::size_t runs) { return 2 * runs + 2; }

}  // namespace

Arena::Arena(std::uint64_t bytes, std::size_t most_runs, bool locked)
    : size_(bytes / kPage * kPage), blocks_(blocks_for(most_runs)) {
  if (size_ == 0) return;
  void* const memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Code::out_of_memory,
                "engine: the budget must be available, got none of " + std::to_string(size_));
  }
  // A child of fork() does not get it: copies of pages that reads past the page cache are on their
  // way to could leave either process without the bytes (open(2), O_DIRECT), and every page that
  // comes later would be a copy.
  (void)::madvise(memory, size_, MADV_DONTFORK);
  // Large pages make the first touch cheaper; where the system declines, nothing is wrong.
  (void)::madvise(memory, size_, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(memory);
  try {
    touch();
    if (locked) lock();
  } catch (...) {
    ::munmap(memory, size_);
    throw;
  }
  for (std::size_t i = 0; i + 1 < blocks_.size(); ++i)
    blocks_[i].next_free = static_cast<Run>(i + 1);
  const Run whole = unused_;
  unused_ = at(whole).next_free;
  at(whole) = {.offset = 0, .bytes = size_, .free = true};
  add_free(whole);
}

// A page that is touched for the first time inside a read costs more than the read of it.
void Arena::touch() {
  int result = 0;
  do result = ::madvise(data_, size_, MADV_POPULATE_WRITE);
  while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EINVAL) {
    throw_errno("engine", "the budget of " + std::to_string(size_) + " bytes must be available");
  }
  for (std::uint64_t at = 0; at < size_; at += kPage)
    const_cast<volatile std::byte&>(data_[at]) = std::byte{};
}

void Arena::lock() {
  if (::mlock(data_, size_) == 0) return;
  const int number = errno;
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  throw Error(Code::out_of_memory, "engine: " + std::to_string(size_) +
                                       " bytes must be allowed to be locked (ulimit -l), got " +
                                       std::to_string(limit.rlim_cur) + ": " +
                                       std::generic_category().message(number));
}

Arena::~Arena() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

std::optional<Arena::Run> Arena::take(std::uint64_t bytes) noexcept {
  Run best = -1;
  for (Run run = first_free_; run >= 0; run = at(run).next_free)
    if (at(run).bytes >= bytes && (best < 0 || at(run).bytes < at(best).bytes)) best = run;
  if (best < 0) return std::nullopt;
  remove_free(best);
  taken_ += bytes;
  if (at(best).bytes > bytes) {
    const Run rest = unused_;
    unused_ = at(rest).next_free;
    at(rest) = {.offset = at(best).offset + bytes,
                .bytes = at(best).bytes - bytes,
                .before = best,
                .after = at(best).after};
    if (at(rest).after >= 0) at(at(rest).after).before = rest;
    at(best).after = rest;
    at(best).bytes = bytes;
    add_free(rest);
  }
  return best;
}

void Arena::give(Run run) noexcept {
  taken_ -= at(run).bytes;
  if (const Run after = at(run).after; after >= 0 && at(after).free) {
    remove_free(after);
    swallow_after(run);
  }
  if (const Run before = at(run).before; before >= 0 && at(before).free) {
    remove_free(before);
    swallow_after(before);
    run = before;
  }
  add_free(run);
}

std::uint64_t Arena::hole(Run run) const noexcept {
  std::uint64_t bytes = at(run).bytes;
  for (const Run beside : {at(run).before, at(run).after})
    if (beside >= 0 && at(beside).free) bytes += at(beside).bytes;
  return bytes;
}

void Arena::add_free(Run run) noexcept {
  at(run).free = true;
  at(run).last_free = -1;
  at(run).next_free = first_free_;
  if (first_free_ >= 0) at(first_free_).last_free = run;
  first_free_ = run;
}

void Arena::remove_free(Run run) noexcept {
  Block& block = at(run);
  block.free = false;
  if (block.last_free >= 0) {
    at(block.last_free).next_free = block.next_free;
  } else {
    first_free_ = block.next_free;
  }
  if (block.next_free >= 0) at(block.next_free).last_free = block.last_free;
}

// The block after `run` becomes part of it.
void Arena::swallow_after(Run run) noexcept {
  const Run gone = at(run).after;
  at(run).bytes += at(gone).bytes;
  at(run).after = at(gone).after;
  if (at(run).after >= 0) at(at(run).after).before = run;
  at(gone).next_free = unused_;
  unused_ = gone;
}

}  // namespace stowage::engine
