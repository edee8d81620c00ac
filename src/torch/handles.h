// SPDX-License-Identifier: Apache-2.0
// Objects that outlive an op call and are named by an integer on the other side of the door.
#pragma once
#include <pthread.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "stowage/error.h"

namespace stowage::door {

template <class T>
class Handles {
 public:
  /// The only one of its class: in a forked child no lost thread must hold the mutex.
  explicit Handles(const char* kind) : kind_(kind) {
    static Handles* const self = this;
    pthread_atfork([] { self->mutex_.lock(); }, [] { self->mutex_.unlock(); },
                   [] { self->mutex_.unlock(); });
  }

  std::int64_t add(std::shared_ptr<T> object) {
    const std::scoped_lock lock(mutex_);
    objects_.emplace(++last_, std::move(object));
    return last_;
  }
  std::shared_ptr<T> get(const char* where, std::int64_t handle) const {
    const std::scoped_lock lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) refuse(where, handle);
    return found->second;
  }
  std::shared_ptr<T> take(const char* where, std::int64_t handle) {
    const std::scoped_lock lock(mutex_);
    auto node = objects_.extract(handle);
    if (node.empty()) refuse(where, handle);
    return std::move(node.mapped());
  }

 private:
  [[noreturn]] void refuse(const char* where, std::int64_t handle) const {
    throw Error(Code::invalid_argument, std::string(where) + ": the handle must be an open " +
                                            kind_ + ", got " + std::to_string(handle));
  }

  const char* kind_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<T>> objects_;
  std::int64_t last_ = 0;  // never used twice: a stale handle is an error, not another file
};
}  // namespace stowage::door
