// SPDX-License-Identifier: Apache-2.0
// Which living engine holds the file that an address is mapped from.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "stowage/engine.h"

namespace stowage::engine {

class Core;

void add_engine(const std::shared_ptr<Core>& core);
void remove_engine(const Core* core) noexcept;
std::optional<Lease> lease_at(const void* mapped, bool formed, std::uint64_t bytes);
std::optional<bool> want_at(std::span<const void* const> mapped,
                            std::span<const std::int64_t> slices, bool one_by_one, bool after);
void together(std::span<const void* const> mapped);

}  // namespace stowage::engine
