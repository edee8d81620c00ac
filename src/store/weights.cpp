// SPDX-License-Identifier: Apache-2.0
// The search goes from the surest source to the weakest; what one has taken, no other looks at. A
// manifest of ours says more than a configuration beside it, which then is for other readers.
#include "store/weights.h"

#include <algorithm>

#include "store/dialects/dialects.h"

namespace stowage {

FoundWeights find_weights(const TensorSource& source) {
  Claims claims(source);
  const bool others = !source.in_memory && !source.is_ours;
  const dialects::FileDialect* const dialect = others ? dialects::recognised(source) : nullptr;
  dialects::read_quant_states(claims);
  dialects::read_manifest(claims);
  dialects::read_labels(claims);
  if (dialect != nullptr)
    dialect->read(claims);
  else
    dialects::read_scaled(claims);
  dialects::read_plain(claims);
  return claims.finish(dialect == nullptr ? "" : dialect->name);
}

inline namespace v0 {

FoundWeights weights_among(const std::string& where, std::vector<TensorInfo> tensors,
                           const std::function<std::string(const TensorInfo&)>& read) {
  std::ranges::sort(tensors, {}, &TensorInfo::name);
  for (TensorInfo& tensor : tensors) tensor.shard = 0;
  return find_weights({.paths = {where}, .tensors = tensors, .read = read, .in_memory = true});
}

}  // namespace v0
}  // namespace stowage
