// SPDX-License-Identifier: Apache-2.0
// `stowage verify`: opening checks the structure, then every stored checksum is compared.

#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "cli/commands.h"
#include "cli/items.h"
#include "cli/text.h"
#include "stowage/file.h"

namespace stowage::cli {

void verify(const VerifyOptions& options) {
  const File file = File::open(options.model);
  const std::int64_t checked = file.verify();
  const auto tensors = static_cast<std::int64_t>(file.tensors().size());
  if (options.json)
    return print(json_text({{"model", options.model},
                            {"dialect", file.dialect()},
                            {"tensors", tensors},
                            {"weights", file.weights().size()},
                            {"checksums", checked},
                            {"without_checksum", tensors - checked}}));
  std::string checksums = formatted("{} checksums agree", checked);
  if (checked == 0)
    checksums = "no checksums are stored";
  else if (checked < tensors)
    checksums += formatted(", {} tensors have none", tensors - checked);
  print(formatted("{}: the structure is sound; {} tensors, {} weights{}; {}\n",
                  printable(options.model), tensors, file.weights().size(), dialect_text(file),
                  checksums));
}

}  // namespace stowage::cli
