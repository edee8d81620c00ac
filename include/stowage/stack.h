// SPDX-License-Identifier: Apache-2.0
// What a stack of matrices is made of, where a file has these one by one.
#pragma once
#include <string>
#include <vector>

#include "stowage/storage.h"

namespace stowage {
inline namespace v0 {

/// Matrices of a file that lie in one stack [E, O, K] of a model, codes and scales in their places:
/// experts that are published with a tensor for each.
struct StackInfo {
  std::string name;
  Storage storage;
  Shape shape;
  std::vector<std::vector<std::string>> matrices;  // of each index of dim 0 the weights that lie
                                                   // under one another there, the first on top
};

}  // namespace v0
}  // namespace stowage
