// SPDX-License-Identifier: Apache-2.0
// What stands behind the handles of the C interface, and what is told of weights and parts.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c/call.h"
#include "stowage/engine.h"
#include "stowage/file.h"
#include "stowage/weight.h"

struct stowage_file {
  explicit stowage_file(stowage::File opened);
  stowage::File file;
  std::vector<std::string> storages;  // of each weight, as text
};

struct stowage_weight {
  explicit stowage_weight(stowage::Weight made, std::string its_name = "",
                          stowage::Dtype computes = stowage::Dtype::unknown);
  stowage::Weight weight;
  std::string name, storage;
  stowage::Dtype compute;
};

struct stowage_engine {
  stowage::Engine engine;
};

struct stowage_lease {
  stowage::Lease lease;
  std::string name;
  stowage::Dtype compute;
  std::optional<stowage_weight> weight = {};  // made when it is first asked for
};

namespace stowage::c {

// The least that a caller may have: what each struct was when it was first there.
inline constexpr std::size_t kWeightInfo = 104, kTensorInfo = 112;
inline constexpr std::size_t kEngineOptions = 48, kEngineReport = 120, kWriterOptions = 24;
inline constexpr std::size_t kUses = 40;

/// Of what a file or a weight says. The texts are borrowed.
stowage_weight_info weight_info(const std::string& name, const std::string& storage, Dtype compute,
                                const Storage& what, const Shape& shape);
stowage_tensor_info tensor_info(const char* name, const char* dtype_name, Dtype dtype,
                                const Shape& shape, std::uint64_t bytes, const void* data);

}  // namespace stowage::c
