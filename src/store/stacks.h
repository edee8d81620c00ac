// SPDX-License-Identifier: Apache-2.0
// Stacks of a file's matrices: which tensors each index of a stack is made of, and addresses where
// its parts can be read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "store/formed_view.h"
#include "stowage/file.h"

namespace stowage {

/// What one tensor gives to one part of a stack.
struct StackPiece {
  const TensorInfo* tensor;
  const WeightInfo* matrix;  // whose part it is
  int part;                  // of both
  std::uint64_t place;       // in the part of the stack
  std::uint64_t bytes;       // there, in all
  std::uint64_t times;       // a number that is there once for each row
};

class Stacks {
 public:
  /// Throws as File::with_stacks() does.
  Stacks(File file, std::vector<StackInfo> infos);

  const std::vector<StackInfo>& infos() const noexcept { return infos_; }
  std::span<const StackPiece> pieces(std::size_t stack, std::int64_t index) const noexcept;
  const std::byte* place(std::size_t stack, int part) const;
  /// The bytes of a piece, from those of its tensor.
  void form(const StackPiece& piece, std::span<const std::byte> tensor,
            std::span<std::byte> out) const;

 private:
  struct Stack {
    std::vector<std::vector<StackPiece>> of_index;
    std::size_t first_view = 0;  // of its parts
  };
  Stack checked(const StackInfo& info) const;
  void make_views() const;
  ViewedTensor viewed(const StackPiece& piece) const;

  File file_;  // without stacks
  std::vector<StackInfo> infos_;
  mutable std::vector<Stack> stacks_;
  mutable std::once_flag viewed_;
  mutable std::unique_ptr<FormedViews> views_;
};

inline namespace v0 {
struct OpenStacks {
  static const Stacks* of(const File& file) noexcept { return file.stacks_.get(); }
};
}  // namespace v0

}  // namespace stowage
