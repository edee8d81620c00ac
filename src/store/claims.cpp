// SPDX-License-Identifier: Apache-2.0
#include "store/claims.h"

#include <utility>

#include "base/formatted.h"

namespace stowage {

std::string described(const TensorInfo& tensor) {
  return formatted("{} {} {}", in_quotes(tensor.name), tensor.dtype_name, to_string(tensor.shape));
}

Place Claims::place(const TensorInfo& tensor) const {
  Place made{source_.paths[static_cast<std::size_t>(tensor.shard)], tensor.name, {}};
  if (!source_.in_memory) made.byte = tensor.offset;
  return made;
}

const TensorInfo& Claims::part(Refusal why, const TensorInfo& near,
                               const Declaration& expected) const {
  const TensorInfo* const tensor = find(expected.name);
  const auto wanted = [&] {
    return formatted("{} {}", disk_name(expected.dtype), to_string(expected.shape));
  };
  if (tensor == nullptr) {
    refuse(why, place(near), formatted("no {} ({})", in_quotes(expected.name), wanted()));
  }
  if (tensor->dtype != expected.dtype || tensor->shape != expected.shape) {
    refuse(why, place(*tensor), formatted("{} for {}", described(*tensor), wanted()));
  }
  return *tensor;
}

WeightInfo& Claims::add(const std::string& name, const Storage& storage, const Shape& shape,
                        std::vector<std::string> parts, std::optional<Dtype> compute) {
  taken_.insert(parts.begin(), parts.end());
  return found_.emplace(name, WeightInfo{name, storage, shape, std::move(parts), compute})
      .first->second;
}

void Claims::add_beside(WeightInfo& weight, const std::string& name) {
  taken_.insert(name);
  weight.beside.push_back(name);
}

void Claims::take_marker(const std::string& name) {
  taken_.insert(name);
  made_.markers.push_back(name);
}

WeightInfo* Claims::known(const std::string& name) {
  const auto at = found_.find(name);
  return at == found_.end() ? nullptr : &at->second;
}

void Claims::add_unreadable(const std::string& name, std::string beside) {
  made_.unreadable.emplace(name, std::move(beside));
}

FoundWeights Claims::finish(std::string_view dialect) {
  for (auto& [name, info] : found_) made_.weights.push_back(std::move(info));
  made_.dialect = dialect;
  return std::move(made_);
}

}  // namespace stowage
