// SPDX-License-Identifier: Apache-2.0
// The table of watched mappings and the SIGBUS handler, which only loads, stores and makes system
// calls, and so do the fillers that it calls.
#include "base/map_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "stowage/error.h"

namespace stowage {

constinit std::atomic<std::uint64_t> damaged_mappings{0};

namespace {

// Taken by whoever sets `taken`, who alone writes the rest. `changes` is odd while the bounds are
// being written: the handler then skips the slot, which cannot be the one it looks for, since
// nobody reads from a mapping that is still being made.
struct Slot {
  std::atomic<std::uintptr_t> begin{0}, end{0};  // whole pages
  std::atomic<const std::string*> path{nullptr};
  std::atomic<bool (*)(void*, const void*) noexcept> fill{nullptr};
  std::atomic<void*> filler{nullptr};
  std::atomic<std::uint32_t> changes{0};
  std::atomic<bool> taken{false}, damaged{false};

  bool covers(std::uintptr_t address) const noexcept {
    const std::uint32_t before = changes.load();
    const bool inside = begin.load() <= address && address < end.load();
    return inside && before % 2 == 0 && changes.load() == before;
  }
  void set(std::uintptr_t first, std::uintptr_t last, const std::string* name,
           const MapFiller& with) noexcept {
    changes.fetch_add(1);
    fill.store(with.fill);
    filler.store(with.self);
    begin.store(first);
    end.store(last);
    path.store(name);
    changes.fetch_add(1);
  }
};
static_assert(std::atomic<std::uintptr_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);

constinit std::array<Slot, kMostMappings> slots;
constinit std::atomic<std::size_t> slots_used{0};  // none from here on was ever taken
struct sigaction previous;                         // written before our handler can run
std::uintptr_t page_bytes;                         // likewise

Slot* slot_of(const void* memory) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::size_t used = slots_used.load();
  for (std::size_t i = 0; i < used; ++i) {
    if (slots[i].covers(address)) return &slots[i];
  }
  return nullptr;
}

// Counted before it is marked: who finds the mark, and so leaves it, must not find a count of none.
void mark(Slot& slot) noexcept {
  if (slot.damaged.load()) return;
  damaged_mappings.fetch_add(1);
  if (slot.damaged.exchange(true)) damaged_mappings.fetch_sub(1);  // by another thread meanwhile
}

// The mark comes first: who sees the zeros finds it set.
bool put_bytes(const void* address) noexcept {
  Slot* const slot = slot_of(address);
  if (slot == nullptr) return false;
  const auto fill = slot->fill.load();
  if (fill != nullptr && fill(slot->filler.load(), address)) return true;
  mark(*slot);
  const std::uintptr_t page = reinterpret_cast<std::uintptr_t>(address) / page_bytes * page_bytes;
  // Not mmap(): sanitizers put a function of theirs there, which is not made for handlers.
  return ::syscall(SYS_mmap, page, slot->end.load() - page, PROT_READ,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != -1;
}

void pass_on(int number, siginfo_t* info, void* context) noexcept {
  if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(number, info, context);
  const bool sent = info->si_code <= 0;  // by a process; no access will fail again
  if (previous.sa_handler == SIG_IGN && sent) return;
  if (previous.sa_handler != SIG_IGN && previous.sa_handler != SIG_DFL) {
    return previous.sa_handler(number);
  }
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(number, &standard, nullptr);
  // Either signal arrives when this handler returns: this one, or that of the same access again.
  if (sent || info->si_code == BUS_MCEERR_AO) ::raise(number);
}

void on_sigbus(int number, siginfo_t* info, void* context) noexcept {
  const int kept = errno;
  const bool ours = info->si_code == BUS_ADRERR && put_bytes(info->si_addr);
  errno = kept;
  if (!ours) pass_on(number, info, context);
}

bool install() noexcept {
  page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  ::sigaction(SIGBUS, nullptr, &previous);
  struct sigaction action {};
  action.sa_sigaction = on_sigbus;
  action.sa_mask = previous.sa_mask;
  action.sa_flags = static_cast<int>(SA_SIGINFO | SA_ONSTACK);
  return ::sigaction(SIGBUS, &action, nullptr) == 0;
}

[[noreturn]] void refuse(const std::string& path) {
  throw Error(Code::bad_file,
              path +
                  ": the file must stay whole while it is open, got one that was cut short or "
                  "could not be read while in use");
}

std::size_t take_slot(const std::string& path) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].taken.load(std::memory_order_relaxed) || slots[i].taken.exchange(true)) continue;
    std::size_t used = slots_used.load();
    while (used <= i && !slots_used.compare_exchange_weak(used, i + 1)) continue;
    return i;
  }
  throw Error(Code::io, path + ": at most " + std::to_string(kMostMappings) +
                            " files must be mapped at a time, got one more");
}

}  // namespace

MapGuard::MapGuard(const void* data, std::uint64_t bytes, std::string path, MapFiller filler)
    : path_(std::move(path)), slot_(take_slot(path_)) {
  [[maybe_unused]] static const bool installed = install();
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t pages = (bytes + page_bytes - 1) / page_bytes;
  slots[slot_].set(begin, begin + pages * page_bytes, &path_, filler);
}

MapGuard::~MapGuard() {
  Slot& slot = slots[slot_];
  slot.set(0, 0, nullptr, {});
  if (slot.damaged.exchange(false)) damaged_mappings.fetch_sub(1);
  slot.taken.store(false);
}

bool MapGuard::damaged() const noexcept { return slots[slot_].damaged.load(); }

void MapGuard::check() const {
  if (damaged()) refuse(path_);
}

bool is_filled(const void* memory) noexcept {
  const Slot* const slot = slot_of(memory);
  if (slot == nullptr || slot->fill.load() == nullptr) return false;
  (void)*static_cast<const volatile std::byte*>(memory);
  return true;
}

void check_memory(const void* memory) {
  if (mappings_damaged() == 0) return;
  const Slot* const slot = slot_of(memory);
  if (slot != nullptr && slot->damaged.load()) refuse(*slot->path.load());
}

}  // namespace stowage
