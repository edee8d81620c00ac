// SPDX-License-Identifier: Apache-2.0
#include "store/dialects/groups.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/formatted.h"

namespace stowage::dialects {
namespace {

std::vector<std::int32_t> numbers_of(const Claims& claims, const TensorInfo& tensor) {
  const std::string bytes = claims.read(tensor);
  std::vector<std::int32_t> numbers(bytes.size() / sizeof(std::int32_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(std::int32_t));
  return numbers;
}

void check(const Claims& claims, Refusal why, const TensorInfo& tensor,
           const std::vector<std::int32_t>& numbers, std::int64_t count) {
  const auto at = std::ranges::find_if(
      numbers, [&](std::int32_t group) { return group < 0 || group >= count; });
  if (at == numbers.end()) return;
  const auto column = static_cast<std::uint64_t>(at - numbers.begin());
  Place place = claims.place(tensor);
  if (place.byte) *place.byte += column * sizeof(std::int32_t);
  refuse(why, place, formatted("group {} of column {}, of {} groups", *at, column, count));
}

}  // namespace

void add_groups(Claims& claims, WeightInfo& weight, const std::string& name) {
  const TensorInfo* const tensor = claims.find(name);
  if (tensor == nullptr) return;
  const std::int64_t columns = weight.shape[1];
  claims.part(Refusal::dialect_part, *tensor, {name, Dtype::i32, Shape{columns}, {}});
  const std::vector<std::int32_t> numbers = numbers_of(claims, *tensor);
  const std::int64_t block = weight.storage.scaling.block, each = block == 0 ? columns : block;
  bool in_order = true;
  for (std::size_t k = 0; k < numbers.size(); ++k)
    in_order &= numbers[k] == static_cast<std::int64_t>(k) / each;
  if (in_order || std::ranges::all_of(numbers, [](std::int32_t group) { return group == -1; }))
    return claims.add_beside(weight, name);
  check(claims, Refusal::dialect_part, *tensor, numbers, ceil_div(columns, each));
  weight.storage.scaling.actorder = true;
  weight.parts.push_back(name);
  if (!weight.forms.empty()) weight.forms.emplace_back();
  claims.take(name);
}

void check_groups(const Claims& claims, Refusal why, const TensorInfo& tensor, std::int64_t count) {
  if (claims.source().in_memory && tensor.bytes > kLongestText) return;  // which nobody reads
  check(claims, why, tensor, numbers_of(claims, tensor), count);
}

bool has_groups(const Wording& wording) {
  return std::ranges::any_of(
      wording.weights(), [](const WeightInfo& weight) { return weight.storage.scaling.actorder; });
}

}  // namespace stowage::dialects
