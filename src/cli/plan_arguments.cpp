// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_arguments.h"

#include <CLI/CLI.hpp>
#include <charconv>

#include "cli/text.h"

namespace stowage::cli {
namespace {

constexpr const char* kFirst = "cuda:0";  // the accelerator that a bare size is of

std::pair<std::string, std::uint64_t> accelerator_of(const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos) return {kFirst, parse_size(text)};
  return {text.substr(0, equals), parse_size(text.substr(equals + 1))};
}

bool is_uses_file(const std::string& text) { return text.ends_with(".json"); }

std::pair<std::string, double> uses_of(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  double uses = 0;
  const char* const end = text.data() + text.size();
  const char* const number = text.data() + (equals == std::string::npos ? 0 : equals + 1);
  const auto [stopped, error] = std::from_chars(number, end, uses);
  if (equals == std::string::npos || equals == 0 || error != std::errc{} || stopped != end)
    throw Error(Code::invalid_argument,
                "--uses: must be GLOB=NUMBER, such as '*.experts.*=0.05', or a file of uses ending "
                "in .json, got '" +
                    text + "'");
  return {text.substr(0, equals), uses};
}

}  // namespace

void add_plan_options(CLI::App& command, PlanTexts& texts, PlanCommand& plan) {
  command.add_option("MODEL", plan.model)->required();
  command.add_option("--ram", texts.ram, "The most bytes of the host's memory: 4GiB")->required();
  command
      .add_option("--accelerator", texts.accelerators,
                  "8GiB (of cuda:0) or NAME=8GiB; may be repeated")
      ->expected(1)
      ->take_all();
  command.add_option("--storage", texts.storage,
                     "As if the weights that `pack` takes rested so: nf4, int8:row, ...");
  command.add_option("--rows", plan.options.rows, "Of x in a pass: tokens")->capture_default_str();
  command.add_option("--activations", texts.activations, "Bytes beside the weights: 512MiB");
  command
      .add_option("--uses", texts.uses,
                  "GLOB=NUMBER of uses in a pass, or uses.json of experts, as stowage.Uses.save of "
                  "Python writes it; may be repeated")
      ->expected(1)
      ->take_all();
  command.add_option("--routed", plan.options.routed,
                     "Experts that a token takes in a layer; else as config.json says");
  command.add_flag("!--no-cpu", plan.options.works_on_cpu,
                   "Multiply on the accelerators only, never where a weight rests");
  command.add_option("-o,--out", plan.out, "Write the plan as JSON to this file too");
  command.add_option("--html", plan.html, "Write a page with pictures to this file");
  command.add_flag("--json", plan.json, "Print the plan as JSON");
}

void read_plan(const PlanTexts& texts, PlanCommand& plan) {
  plan.options.ram = parse_size(texts.ram);
  if (!texts.activations.empty()) plan.options.activations = parse_size(texts.activations);
  if (!texts.storage.empty()) plan.options.storage = parse_storage(texts.storage);
  for (const std::string& text : texts.accelerators)
    plan.options.accelerators.push_back(accelerator_of(text));
  for (const std::string& text : texts.uses) {
    if (is_uses_file(text) && !plan.options.routing.empty())
      throw Error(Code::invalid_argument,
                  "--uses: must name one file of uses, got another " + text);
    if (is_uses_file(text))
      plan.options.routing = routing_from_json(read_text(text), text);
    else
      plan.options.uses.push_back(uses_of(text));
  }
}

}  // namespace stowage::cli
