// SPDX-License-Identifier: Apache-2.0
// Which living engine holds the file that an address is mapped from.
#pragma once
#include <memory>
#include <optional>

#include "stowage/engine.h"

namespace stowage::engine {

class Core;

void add_engine(const std::shared_ptr<Core>& core);
void remove_engine(const Core* core) noexcept;
std::optional<Lease> lease_at(const void* mapped, bool formed);

}  // namespace stowage::engine
