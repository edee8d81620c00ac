// SPDX-License-Identifier: Apache-2.0
// Compiled programs in a folder, for all processes: found by what they are made of.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/compiler.h"
#include "stowage/storage.h"

namespace stowage::device {

/// Where programs are kept: stowage/cuda in the folder for caches.
std::string programs_folder();

class KeptPrograms {
 public:
  /// A folder that need not be there; "" keeps nothing.
  explicit KeptPrograms(std::string folder) : folder_(std::move(folder)) {}

  struct Program {
    std::string code;
    bool found;        // it was compiled before
    std::string path;  // "": it is not kept
  };
  /// The code of a text for an architecture, compiled if it must be and kept if it can be. Throws
  /// as Compiler::compile().
  Program get(const std::string& text, const Compiler& compiler, int architecture) const;

 private:
  std::string folder_;
};

/// What `stowage compile` makes of a storage: programs for whole pieces, which are nearly all;
/// products with so many rows of x, none: with each number of them, and those of more.
struct Ahead {
  std::string file;  // of src/kernel/cuda
  int x_rows;        // of products; else 0
  bool many;         // of products of more rows, so many at a time
  bool groups;       // of them, each with a matrix of its own
  std::string text;
};
std::vector<Ahead> programs_ahead(const Storage& storage, Dtype values, int architecture,
                                  std::span<const int> x_rows);

}  // namespace stowage::device
