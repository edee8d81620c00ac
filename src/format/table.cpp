// SPDX-License-Identifier: Apache-2.0
// Rows of the table of formats, by their codes.
#include "format/table.h"

#include <algorithm>

namespace stowage {

using table::kForms;

const FormRow* form_row(Codes codes, Dialect dialect) noexcept {
  if (dialect == Dialect::standard)
    return codes < Codes{kCodesCount} ? &kForms[static_cast<std::size_t>(codes)] : nullptr;
  const auto same = [&](const FormRow& r) { return r.codes == codes && r.dialect == dialect; };
  const auto* const found = std::ranges::find_if(kForms, same);
  return found == kForms.end() ? nullptr : found;
}

std::span<const FormRow> form_rows() noexcept { return kForms; }

inline namespace v0 {

const FormatTrait& trait(Codes codes) noexcept {
  return table::kFormats[static_cast<std::size_t>(codes)];
}

std::span<const FormatTrait> formats() noexcept { return table::kFormats; }

}  // namespace v0
}  // namespace stowage
