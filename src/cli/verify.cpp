// SPDX-License-Identifier: Apache-2.0
// `stowage verify`: opening checks the structure, then every stored checksum is compared.
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/text.h"
#include "stowage/file.h"

namespace stowage::cli {

void verify(const VerifyOptions& options) {
  const File file = File::open(options.model);
  const std::int64_t checked = file.verify();
  const auto tensors = static_cast<std::int64_t>(file.tensors().size());
  std::string checksums = fmt::format("{} checksums agree", checked);
  if (checked == 0)
    checksums = "no checksums are stored";
  else if (checked < tensors)
    checksums += fmt::format(", {} tensors have none", tensors - checked);
  print(fmt::format("{}: the structure is sound; {} tensors, {} weights; {}\n",
                    printable(options.model), tensors, file.weights().size(), checksums));
}

}  // namespace stowage::cli
