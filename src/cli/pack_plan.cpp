// SPDX-License-Identifier: Apache-2.0
#include "cli/pack_plan.h"

#include <algorithm>
#include <cstring>

namespace stowage::cli {
namespace {

Storage plain_storage(Dtype dtype) {
  if (dtype == Dtype::bf16) return {.codes = Codes::bf16};
  return {.codes = dtype == Dtype::f16 ? Codes::f16 : Codes::f32};
}

// What a packed weight computes in: as asked, else as it did before (f64 models: f32).
std::optional<Dtype> compute_of(const Source& source, const PackOptions& options) {
  if (options.compute) return options.compute;
  if (!source.is_plain_float()) return source.weight->compute;
  return source.tensor->dtype == Dtype::f64 ? Dtype::f32 : source.tensor->dtype;
}

void make_rest(Item& item, const File& file, const Storage& asked, const PackOptions& options) {
  const Source& source = item.source;
  const Storage storage =
      storage_for_values(asked, source.is_plain_float() ? source.tensor->dtype : Dtype::f32);
  if (source.weight != nullptr && source.weight->storage == storage) {
    item.reason = "is " + to_string(storage) + " already";
    return;
  }
  in_tensor(file, source, [&] { return layout(storage, source.shape); });
  item.action = Item::Action::quantize;
  item.storage = storage;
  item.compute = compute_of(source, options);
}

// Plain floats follow --compute. What rests stays as it is, unless a rule says `plain` or the
// reader could not open it.
void make_plain(Item& item, bool by_rule, const PackOptions& options) {
  const Source& source = item.source;
  std::optional<Dtype> dtype = options.compute;
  if (source.rests()) {
    if (!by_rule && !options.for_bitsandbytes) {
      item.reason = "rests already, as " + to_string(source.weight->storage);
      return;
    }
    dtype = compute_of(source, options).value_or(Dtype::bf16);
  } else if (!source.is_plain_float() || !dtype || dtype == source.tensor->dtype) {
    return;
  }
  item.action = Item::Action::cast;
  item.storage = plain_storage(*dtype);
}

bool same_bytes(const File& file, const TensorInfo& a, const TensorInfo& b) {
  const auto x = file.bytes(a), y = file.bytes(b);
  return a.dtype == b.dtype && a.shape == b.shape &&
         (x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0);
}

// A file may hold a tied weight twice; a head that equals an embedding is that embedding.
const Source* embedding_of(const File& file, const Source& head, const std::vector<Source>& all) {
  if (!is_head(head.name) || !head.is_plain_float()) return nullptr;
  const auto found = std::ranges::find_if(all, [&](const Source& other) {
    return is_embedding(other.name) && other.is_plain_float() && other.shape == head.shape &&
           same_bytes(file, *other.tensor, *head.tensor);
  });
  return found == all.end() ? nullptr : &*found;
}

const Rule* rule_for(const Policy& policy, std::string_view name) {
  const auto rule =
      std::ranges::find_if(policy.rules, [&](const Rule& r) { return matches(r, name); });
  return rule == policy.rules.end() ? nullptr : &*rule;
}

// A rule that nothing matches is nearly always a misspelt name.
void check_rules(const Policy& policy, const std::vector<Source>& all) {
  for (const Rule& rule : policy.rules)
    if (std::ranges::none_of(all, [&](const Source& s) { return matches(rule, s.name); }))
      throw UsageError("rule '" + rule.glob + "': must match a tensor of the model, matches none");
}

}  // namespace

std::vector<Item> plan_pack(const File& file, const PackOptions& options) {
  const std::vector<Source> all = sources(file);
  check_rules(options.policy, all);
  std::vector<Item> items;
  for (const Source& source : all) {
    const Source* tied = embedding_of(file, source, all);
    const std::string& name = tied == nullptr ? source.name : tied->name;
    const bool floating = source.is_plain_float() || source.rests();
    const Choice choice = choose(options.policy, name, source.shape, floating);
    Item item{.source = source, .storage = {}, .reason = choice.reason, .compute = {}};
    if (tied != nullptr) item.reason = "tied to " + name;
    if (choice.storage)
      make_rest(item, file, *choice.storage, options);
    else
      make_plain(item, rule_for(options.policy, name) != nullptr, options);
    items.push_back(std::move(item));
  }
  return items;
}

std::vector<Declaration> declarations(const Item& item) {
  const Source& source = item.source;
  switch (item.action) {
    case Item::Action::quantize:
      return disk_layout(source.name, item.storage, source.shape);
    case Item::Action::cast:
      return {{source.name, trait(item.storage.codes).disk, source.shape, "", 0}};
    case Item::Action::copy:
      break;
  }
  if (source.rests()) return disk_layout(source.name, source.weight->storage, source.shape);
  return {declare_copy(*source.tensor)};
}

}  // namespace stowage::cli
