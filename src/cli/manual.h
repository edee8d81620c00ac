// SPDX-License-Identifier: Apache-2.0
// The command line as others read it: a page for man, and scripts by which shells complete it. Both
// are made from the parser itself, so that they have every option that it has.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

namespace stowage::cli {

/// In roff: `stowage manual > stowage.1; man ./stowage.1`.
std::string manual_page(const CLI::App& app);
/// For "bash", "zsh" or "fish": `eval "$(stowage completion bash)"`. Throws UsageError for others.
std::string completion_script(const CLI::App& app, const std::string& shell);

}  // namespace stowage::cli
