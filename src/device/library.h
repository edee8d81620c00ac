// SPDX-License-Identifier: Apache-2.0
// Libraries that are found when they are asked for: one build serves machines with and without
// them.
#pragma once
#include <dlfcn.h>

#include <string>

#include "stowage/error.h"

namespace stowage::device {

/// A shared library, never closed: drivers do not like to be.
class Library {
 public:
  /// `where`: what errors begin with; `name`: what dlopen() is asked for. Throws unsupported.
  Library(std::string where, std::string name)
      : where_(std::move(where)),
        name_(std::move(name)),
        handle_(::dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr)
      throw Error(Code::unsupported, where_ + " must be there, got " + std::string(::dlerror()));
  }
  /// Throws unsupported where it has none of that name.
  template <class Function>
  void find(const char* symbol, Function*& found) const {
    found = reinterpret_cast<Function*>(::dlsym(handle_, symbol));
    if (found == nullptr)
      throw Error(Code::unsupported, where_ + ": " + name_ + " must have " + symbol + ", got none");
  }

 private:
  std::string where_, name_;
  void* handle_;
};

}  // namespace stowage::device
