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
  enum class Against { end, begin };  // which fence the bytes lie against

  explicit Fenced(std::size_t bytes, Against against = Against::end)
      : bytes_(bytes), page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    room_ = (bytes + page_ - 1) / page_ * page_;
    map_ = ::mmap(nullptr, room_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    char* inside = static_cast<char*>(map_) + page_;
    if (room_ != 0 && ::mprotect(inside, room_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    data_ = against == Against::end ? inside + room_ - bytes : inside;
  }
  Fenced(std::span<const std::byte> bytes, Against against) : Fenced(bytes.size(), against) {
    if (!bytes.empty()) std::memcpy(data_, bytes.data(), bytes.size());
  }
  ~Fenced() { ::munmap(map_, room_ + 2 * page_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  char* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  std::size_t bytes_, page_, room_;
  void* map_;
  char* data_;
};

}  // namespace stowage::samples
