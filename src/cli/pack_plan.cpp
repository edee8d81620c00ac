// SPDX-License-Identifier: Apache-2.0
#include "cli/pack_plan.h"

#include <algorithm>
#include <cstring>

#include "base/formatted.h"

namespace stowage::cli {
namespace {

Storage plain_storage(Dtype dtype) {
  if (dtype == Dtype::bf16) return {.codes = Codes::bf16};
  return {.codes = dtype == Dtype::f16 ? Codes::f16 : Codes::f32};
}

// What a packed weight computes in: as asked, else as it did before (f64 models: f32).
std::optional<Dtype> compute_of(const Item& item, const PackOptions& options) {
  if (options.compute) return options.compute;
  if (!item.is_plain_float()) return item.weight->compute;
  return item.tensor->dtype == Dtype::f64 ? Dtype::f32 : item.tensor->dtype;
}

void make_rest(PackTask& packing, const File& file, const Storage& asked,
               const PackOptions& options) {
  const Item& item = packing.item;
  const Storage storage =
      storage_for_values(asked, item.is_plain_float() ? item.tensor->dtype : Dtype::f32);
  if (item.weight != nullptr && item.weight->storage == storage) {
    packing.reason = "is " + to_string(storage) + " already";
    return;
  }
  in_tensor(file, item, [&] { return layout(storage, item.shape); });
  packing.action = PackTask::Action::quantize;
  packing.storage = storage;
  packing.compute = compute_of(item, options);
}

// Plain floats follow --compute. What rests stays as it is, unless a rule says `plain` or the
// reader could not open it.
void make_plain(PackTask& packing, bool by_rule, const PackOptions& options) {
  const Item& item = packing.item;
  std::optional<Dtype> dtype = options.compute;
  if (item.rests()) {
    if (!by_rule && !options.for_bitsandbytes) {
      packing.reason = "rests already, as " + to_string(item.weight->storage);
      return;
    }
    dtype = compute_of(item, options).value_or(Dtype::bf16);
  } else if (!item.is_plain_float() || !dtype || dtype == item.tensor->dtype) {
    return;
  }
  packing.action = PackTask::Action::cast;
  packing.storage = plain_storage(*dtype);
}

bool same_bytes(const File& file, const TensorInfo& a, const TensorInfo& b) {
  const auto x = file.bytes(a), y = file.bytes(b);
  return a.dtype == b.dtype && a.shape == b.shape &&
         (x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0);
}

// A file may hold a tied weight twice; a head that equals an embedding is that embedding.
const Item* embedding_of(const File& file, const Item& head, const std::vector<Item>& all) {
  if (!is_head(head.name) || !head.is_plain_float()) return nullptr;
  const auto found = std::ranges::find_if(all, [&](const Item& other) {
    return is_embedding(other.name) && other.is_plain_float() && other.shape == head.shape &&
           same_bytes(file, *other.tensor, *head.tensor);
  });
  return found == all.end() ? nullptr : &*found;
}

// Whether it is said by name that a tensor stays plain, or what it rests as.
bool is_named(const Policy& policy, std::string_view name) {
  const auto hits = [&](const std::string& glob) { return matches(glob, name); };
  return std::ranges::any_of(policy.skips, hits) ||
         std::ranges::any_of(policy.rules, hits, &Rule::glob);
}

// A glob that nothing matches is nearly always a misspelt name.
void check_globs(const Policy& policy, const std::vector<Item>& all) {
  const auto check = [&](const char* what, const std::string& glob) {
    if (std::ranges::none_of(all, [&](const Item& item) { return matches(glob, item.name); }))
      throw UsageError(
          formatted("{} '{}': must match a tensor of the model, matches none", what, glob));
  };
  for (const std::string& glob : policy.skips) check("skip", glob);
  for (const Rule& rule : policy.rules) check("rule", rule.glob);
}

}  // namespace

std::vector<PackTask> plan_pack(const File& file, const PackOptions& options) {
  const std::vector<Item> all = items_of(file);
  if (!options.allow_unmatched) check_globs(options.policy, all);
  std::vector<PackTask> packings;
  for (const Item& item : all) {
    const Item* tied = embedding_of(file, item, all);
    const std::string& name = tied == nullptr ? item.name : tied->name;
    const bool floating = item.is_plain_float() || item.rests();
    const Choice choice = choose(options.policy, name, item.shape, floating);
    PackTask packing{.item = item, .storage = {}, .reason = choice.reason, .compute = {}};
    if (tied != nullptr) packing.reason = "tied to " + name;
    if (choice.storage)
      make_rest(packing, file, *choice.storage, options);
    else
      make_plain(packing, is_named(options.policy, name), options);
    packings.push_back(std::move(packing));
  }
  return packings;
}

std::vector<Declaration> declarations(const PackTask& packing) {
  const Item& item = packing.item;
  if (!packing.said.empty()) {
    std::vector<Declaration> made;
    for (const DialectTensor& tensor : packing.said) made.push_back(tensor.declaration);
    return made;
  }
  switch (packing.action) {
    case PackTask::Action::quantize:
      return disk_layout(item.name, packing.storage, item.shape);
    case PackTask::Action::cast:
      return {{item.name, trait(packing.storage.codes).disk, item.shape, "", 0}};
    case PackTask::Action::copy:
      break;
  }
  if (item.rests()) return disk_layout(item.name, item.weight->storage, item.shape);
  return {declare_copy(*item.tensor)};
}

}  // namespace stowage::cli
