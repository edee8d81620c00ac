// SPDX-License-Identifier: Apache-2.0
// Parts that a file has in another order, at addresses where whoever touches them finds them: a
// part is formed whole when one of its bytes is touched. Few stay, so that who reads all of a model
// has no second one in memory.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/map_guard.h"
#include "store/part_form.h"

namespace stowage {

/// Whether a part has such an address: not what is rounded to a dtype that the model chooses, nor
/// what no tensor has.
bool has_view(const PartForm& form) noexcept;

/// What a part has of one tensor.
struct ViewedTensor {
  const MappedFile* file;
  std::uint64_t offset, held;  // of the tensor, and its bytes
  Place place;
  PartForm form;
  Shape shape;
  std::uint64_t begin = 0, bytes = 0;  // in the part
  std::uint64_t times = 1;             // it is there, side by side
};
/// What one is made of.
struct ViewedPart {
  std::uint64_t bytes;
  std::vector<ViewedTensor> tensors;
};

class FormedViews {
 public:
  /// The files must outlive it. Throws io where the system has no addresses.
  explicit FormedViews(std::vector<ViewedPart> parts);
  FormedViews(const FormedViews&) = delete;
  FormedViews& operator=(const FormedViews&) = delete;
  ~FormedViews();

  const std::byte* address(std::size_t part) const noexcept { return data_ + begins_[part]; }

 private:
  static constexpr std::size_t kStay = 4;

  void close() noexcept;
  static bool fill(void* self, const void* address) noexcept;
  bool fill_part(std::size_t part);
  static bool fill_from(const ViewedTensor& tensor, std::span<std::byte> part);
  void note(std::size_t part) noexcept;
  void drop(std::size_t part) noexcept;
  std::uint64_t pages(std::size_t part) const noexcept { return begins_[part + 1] - begins_[part]; }

  std::vector<ViewedPart> parts_;
  std::vector<std::uint64_t> begins_;  // whole pages; and the end
  int nothing_ = -1;                   // a file without bytes, which is mapped where no part is
  std::byte* data_ = nullptr;
  std::array<std::atomic<std::size_t>, kStay> recent_{};  // one more than the part; 0: none
  std::atomic<std::size_t> turn_{0};
  std::unique_ptr<MapGuard> guard_;
};

}  // namespace stowage
