// SPDX-License-Identifier: Apache-2.0
// Which weights of a model rest, and how. A file has names and shapes only, so the rules read
// those; python/stowage/_model/choice/selection.py chooses the same set from the modules
// (docs/cli.md has the rules).
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/storage.h"

namespace stowage {

/// `GLOB=STORAGE` or `GLOB=plain`.
struct Rule {
  std::string glob;
  std::optional<Storage> storage;  // none: stays plain
};
/// Throws invalid_argument.
Rule parse_rule(std::string_view text);
/// A glob is held against the weight's name and the path of every module that contains it.
bool matches(const std::string& glob, std::string_view name);

struct Policy {
  std::vector<std::string> skips{};  // globs of what stays plain whatever a rule says
  std::vector<Rule> rules;           // the first match decides
  std::optional<Storage> storage;    // of what no rule names and the defaults select
  bool linears_only = false;         // matrices that are no embedding: what bitsandbytes replaces
};

/// A storage, or the reason why the tensor stays plain.
struct Choice {
  std::optional<Storage> storage;
  std::string reason;
};
/// `floating`: it holds f64, f32, bf16 or f16 values, or is a weight that rests already.
Choice choose(const Policy& policy, std::string_view name, const Shape& shape, bool floating);

/// "a.b.weight" -> "a.b"; "weight" -> "".
std::string_view module_path(std::string_view name);
/// The weight of the module that computes a model's answer: rounding shows most there.
bool is_head(std::string_view name);
/// The weight of the module that picks a mixture's experts: it is small, and rounding there changes
/// which expert works. Layers of gated MLPs that are called `gate` have more rows.
bool is_router(std::string_view name, const Shape& shape);
/// The weight of an embedding, as models name theirs.
bool is_embedding(std::string_view name);

}  // namespace stowage
