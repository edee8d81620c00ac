// SPDX-License-Identifier: Apache-2.0
// `stowage plan`: which weight rests where, from headers alone.
#include <cstdio>

#include "base/env.h"
#include "cli/commands.h"
#include "cli/text.h"
#include "page/page.h"

namespace stowage::cli {
namespace {

// Measuring takes seconds: who waits is told why.
Links links_for(const std::string& path) {
  bool measured = false;
  Links links = links_of_this_machine(path, false, &measured);
  if (measured)
    std::fprintf(stderr, "stowage: measured this machine once, kept in %s\n",
                 printable(env::links_path()).c_str());
  return links;
}

}  // namespace

void plan(const PlanCommand& command) {
  const File file = File::open(command.model);
  Plan made = make_plan(file, command.options, links_for(file.paths().front()));
  made.model = command.model;
  if (!command.out.empty()) write_text(command.out, to_json(made));
  if (!command.html.empty()) write_text(command.html, page::html_of(made));
  print(command.json ? to_json(made) : to_text(made));
}

}  // namespace stowage::cli
