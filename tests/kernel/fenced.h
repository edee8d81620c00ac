// SPDX-License-Identifier: Apache-2.0
// Memory with a page that may not be touched on either side: reading or writing one byte past an
// end of it ends the test program.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <span>

namespace stowage::samples {

class Fenced {
 public:
  enum class Against { end, begin };  // which fence a piece lies against

  explicit Fenced(std::size_t most)
      : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
        room_((most + page_ - 1) / page_ * page_),
        map_(::mmap(nullptr, room_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (map_ == MAP_FAILED || ::mprotect(first(), room_, PROT_READ | PROT_WRITE) != 0)
      throw std::bad_alloc();
  }
  ~Fenced() { ::munmap(map_, room_ + 2 * page_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  /// A piece of the room, which all pieces share.
  char* piece(std::size_t bytes, Against against) const noexcept {
    return against == Against::end ? first() + room_ - bytes : first();
  }
  /// The same, with a copy of the bytes.
  char* piece(std::span<const std::byte> bytes, Against against) const noexcept {
    char* place = piece(bytes.size(), against);
    if (!bytes.empty()) std::memcpy(place, bytes.data(), bytes.size());
    return place;
  }

 private:
  char* first() const noexcept { return static_cast<char*>(map_) + page_; }

  std::size_t page_, room_;
  void* map_;
};

}  // namespace stowage::samples
