// SPDX-License-Identifier: Apache-2.0
// The addresses are those of a mapping of a file without bytes: a touch is a SIGBUS, whose handler
// forms the part into memory beside and moves that here, in one step that other threads see whole.
#include "store/formed_view.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/checked.h"
#include "base/file_error.h"
#include "store/shard.h"

namespace stowage {
namespace {

// Not mmap() and the like: sanitizers put functions of theirs there, which are not made for
// handlers of signals.
std::byte* system_map(const void* at, std::uint64_t bytes, int protection, int flags, int file) {
  const long made = ::syscall(SYS_mmap, at, bytes, protection, flags, file, 0);
  return made == -1 ? nullptr : reinterpret_cast<std::byte*>(made);
}

/// Memory of its own, without malloc.
class Pages {
 public:
  explicit Pages(std::uint64_t bytes)
      : bytes_(bytes),
        data_(system_map(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1)) {
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() {
    if (data_ != nullptr) ::syscall(SYS_munmap, data_, bytes_);
  }
  std::byte* data() const noexcept { return data_; }
  /// Read-only from now on, at an address where something is mapped.
  bool move_to(const std::byte* to) noexcept {
    if (::syscall(SYS_mprotect, data_, bytes_, PROT_READ) != 0) return false;
    const long moved =
        ::syscall(SYS_mremap, data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (moved == -1) return false;
    data_ = nullptr;
    return true;
  }

 private:
  std::uint64_t bytes_;
  std::byte* data_;
};

bool read_all(int file, std::uint64_t offset, std::span<std::byte> to) noexcept {
  while (!to.empty()) {
    const long got = ::syscall(SYS_pread64, file, to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to = to.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return true;
}

}  // namespace

bool has_view(const PartForm& form) noexcept {
  return !form.is_whole() && !form.rounded && !form.one;
}

FormedViews::FormedViews(std::vector<ViewedPart> parts) : parts_(std::move(parts)), begins_{0} {
  for (const ViewedPart& part : parts_)
    begins_.push_back(begins_.back() +
                      std::max<std::uint64_t>(ceil_div(part.bytes, kPage), 1) * kPage);
  const std::string& path = parts_.front().tensors.front().file->path();
  nothing_ = ::memfd_create("stowage", MFD_CLOEXEC);
  if (nothing_ < 0) throw_errno(path, "must have addresses for parts in another order");
  data_ = system_map(nullptr, begins_.back(), PROT_READ, MAP_SHARED | MAP_NORESERVE, nothing_);
  if (data_ == nullptr) {
    ::close(nothing_);
    throw_errno(path, "must have addresses for parts in another order");
  }
  try {
    guard_ = std::make_unique<MapGuard>(data_, begins_.back(), path, MapFiller{&fill, this});
  } catch (...) {
    close();
    throw;
  }
}

FormedViews::~FormedViews() { close(); }

void FormedViews::close() noexcept {
  guard_.reset();
  ::munmap(data_, begins_.back());
  ::close(nothing_);
}

bool FormedViews::fill(void* self, const void* address) noexcept {
  auto& views = *static_cast<FormedViews*>(self);
  const auto at = static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - views.data_);
  const auto after = std::ranges::upper_bound(views.begins_, at);
  const auto part = static_cast<std::size_t>(after - views.begins_.begin()) - 1;
  try {
    return views.fill_part(part);
  } catch (...) {
    return false;  // numbers that no part has: as if the file had lost its bytes
  }
}

bool FormedViews::fill_part(std::size_t part) {
  Pages made(pages(part));
  if (made.data() == nullptr) return false;
  for (const ViewedTensor& tensor : parts_[part].tensors)
    if (!fill_from(tensor, {made.data(), parts_[part].bytes})) return false;
  if (!made.move_to(address(part))) return false;
  note(part);
  return true;
}

bool FormedViews::fill_from(const ViewedTensor& of, std::span<std::byte> part) {
  const auto out = part.subspan(of.begin, of.bytes), one = out.first(of.bytes / of.times);
  if (of.form.is_whole()) {
    if (!read_all(of.file->descriptor(), of.offset, one)) return false;
  } else {
    const std::uint64_t all = std::max<std::uint64_t>(ceil_div(of.held, kPage), 1) * kPage;
    const Pages held(sizeof(Room) + all);  // not on the stack, of which a handler has little
    if (held.data() == nullptr) return false;
    const std::span bytes(held.data() + sizeof(Room), of.held);
    if (!read_all(of.file->descriptor(), of.offset, bytes)) return false;
    form_part(of.form, {of.place, bytes}, of.shape, Dtype::f32, one, 0,
              *reinterpret_cast<Room*>(held.data()));
  }
  for (std::uint64_t k = 1; k < of.times; ++k)
    std::copy(one.begin(), one.end(), out.begin() + static_cast<std::ptrdiff_t>(k * one.size()));
  return true;
}

// Those that were touched last stay. A thread that reads from one that goes touches it again.
void FormedViews::note(std::size_t part) noexcept {
  for (const auto& one : recent_)
    if (one.load() == part + 1) return;
  const std::size_t gone = recent_[turn_.fetch_add(1) % kStay].exchange(part + 1);
  if (gone != 0) drop(gone - 1);
}

void FormedViews::drop(std::size_t part) noexcept {
  (void)system_map(address(part), pages(part), PROT_READ, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                   nothing_);
}

}  // namespace stowage
