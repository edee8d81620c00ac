// SPDX-License-Identifier: Apache-2.0
// One index of a stack [E, ...] that rests, where its bytes are now.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "stowage/descriptor.h"
#include "stowage/engine.h"
#include "stowage/weight.h"

namespace stowage::door {

/// Index `index` of `stack` in the memory of the engine that has the stack by its indices, which is
/// leased as long as this lives; where none has, where the stack lies.
class Slice {
 public:
  Slice(const Weight& stack, std::int64_t index) : weight_(stack), row_(index) {
    const Layout parts = layout(stack.storage(), stack.shape());
    const std::int64_t codes = parts.parts[0].bytes / stack.rows();
    const auto* const at = static_cast<const std::byte*>(stack.part(0)) + index * codes;
    auto lease = Engine::lease_at(at, false, static_cast<std::uint64_t>(codes));
    if (!lease) return;
    lease_.emplace(std::move(*lease));
    weight_ = as(stack, lease_->weight());
    row_ = (static_cast<const std::byte*>(lease_->at(at)) -
            static_cast<const std::byte*>(weight_.part(0))) /
           codes;
  }
  const Weight& weight() const noexcept { return weight_; }  // of some indices
  std::int64_t row() const noexcept { return row_; }         // the number of `index` among these

 private:
  // An engine says how a stack lies transposed; who asks may have said what lies there.
  static Weight as(const Weight& stack, const Weight& some) {
    if (some.storage() == stack.storage()) return some;
    std::array<const void*, kMaxParts> parts;
    for (int i = 0; i < kMaxParts; ++i) parts[static_cast<std::size_t>(i)] = some.part(i);
    const auto count = static_cast<std::size_t>(layout(some.storage(), some.shape()).count);
    return {lying(some.storage()), lying(some.storage(), some.shape()),
            std::span(parts).first(count)};
  }
  std::optional<Lease> lease_;
  Weight weight_;
  std::int64_t row_;
};

}  // namespace stowage::door
