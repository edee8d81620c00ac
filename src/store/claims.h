// SPDX-License-Identifier: Apache-2.0
// What readers of dialects share while they find out what the tensors of a file are: each takes
// those that it knows, and nobody looks at a taken one again.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "store/refusal.h"
#include "store/tensor_source.h"
#include "stowage/writer.h"

namespace stowage {

class Claims {
 public:
  explicit Claims(const TensorSource& source) : source_(source) {}

  const TensorSource& source() const noexcept { return source_; }
  const std::vector<TensorInfo>& tensors() const noexcept { return source_.tensors; }
  const TensorInfo* find(std::string_view name) const { return find_tensor(source_.tensors, name); }
  Place place(const TensorInfo& tensor) const;
  /// Its bytes, at most kLongestText of them.
  std::string read(const TensorInfo& tensor) const { return source_.read(tensor); }

  bool is_taken(std::string_view name) const { return taken_.contains(name); }
  void take(const std::string& name) { taken_.insert(name); }
  /// The tensor that must be there as declared; refusals stand at `near` where it is absent.
  const TensorInfo& part(Refusal why, const TensorInfo& near, const Declaration& expected) const;

  /// Adds a weight and takes its parts.
  WeightInfo& add(const std::string& name, const Storage& storage, const Shape& shape,
                  std::vector<std::string> parts, std::optional<Dtype> compute);
  /// Takes a tensor that only tells what the weight is, or what its readers need not know.
  void add_beside(WeightInfo& weight, const std::string& name);
  /// Takes a tensor that only shows the dialect of the file.
  void take_marker(const std::string& name);
  WeightInfo* known(const std::string& name);
  void add_unreadable(const std::string& name, std::string beside);
  bool is_unreadable(const std::string& name) const { return made_.unreadable.contains(name); }

  FoundWeights finish(std::string_view dialect);

 private:
  const TensorSource& source_;
  std::set<std::string, std::less<>> taken_;
  std::map<std::string, WeightInfo> found_;
  FoundWeights made_;
};

/// "'w_scale' F32 [4, 1]": as refusals name a tensor.
std::string described(const TensorInfo& tensor);

}  // namespace stowage
