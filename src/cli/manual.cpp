// SPDX-License-Identifier: Apache-2.0
#include "cli/manual.h"

#include "base/formatted.h"
#include "cli/commands.h"
#include "stowage/info.h"

namespace stowage::cli {
namespace {

// A text as roff shows it: no line is a request, and a dash is a dash.
std::string roff(const std::string& text) {
  std::string made;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool begins = i == 0 || text[i - 1] == '\n';
    if (begins && (c == '.' || c == '\'')) made += "\\&";
    if (c == '\\')
      made += "\\e";
    else if (c == '-')
      made += "\\-";
    else
      made += c;
  }
  return made;
}

// What stands in single quotes for a shell.
std::string quoted(const std::string& text) {
  std::string made = "'";
  for (const char c : text) made += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return made + "'";
}

std::string value_of(const CLI::Option& option) {
  return option.get_items_expected_max() == 0 ? "" : " " + option.get_type_name();
}

// "--json", "-o,--out": the names that begin with dashes; "" for what stands by its place.
std::string flags(const CLI::Option& option) {
  return option.get_positional() ? "" : option.get_name(false, true);
}

void describe(const CLI::App& command, std::string& page) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string names = flags(*option);
    const std::string shown = names.empty() ? option->get_name(true) : names + value_of(*option);
    page += formatted(".TP\n\\fB{}\\fR\n{}\n", roff(shown), roff(option->get_description()));
  }
}

std::vector<std::string> names_of(const CLI::App& command) {
  std::vector<std::string> found;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) found.push_back("--" + name);
    for (const std::string& name : option->get_snames()) found.push_back("-" + name);
  }
  return found;
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::string joined(const std::vector<std::string>& words) {
  std::string made;
  for (const std::string& word : words) made += (made.empty() ? "" : " ") + word;
  return made;
}

std::string command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands_of(app)) names.push_back(command->get_name());
  return joined(names);
}

// Of bash, which zsh runs too. Words that are no options are files.
std::string bash(const CLI::App& app) {
  std::string cases;
  for (const CLI::App* command : commands_of(app))
    cases +=
        formatted("    {}) words={} ;;\n", command->get_name(), quoted(joined(names_of(*command))));
  return formatted(
      "_stowage() {{\n"
      "  local word=${{COMP_WORDS[COMP_CWORD]}} words={}\n"
      "  if [ \"$COMP_CWORD\" -gt 1 ]; then\n"
      "    case ${{COMP_WORDS[1]}} in\n{}    esac\n"
      "    case $word in -*) ;; *) words= ;; esac\n"
      "  fi\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}}\n"
      "complete -o default -F _stowage stowage\n",
      quoted(command_names(app) + " " + joined(names_of(app))), cases);
}

std::string fish(const CLI::App& app) {
  std::string made;
  for (const CLI::App* command : commands_of(app)) {
    made += formatted("complete -c stowage -n __fish_use_subcommand -a {} -d {}\n",
                      command->get_name(), quoted(command->get_description()));
    for (const CLI::Option* option : command->get_options())
      for (const std::string& name : option->get_lnames())
        made +=
            formatted("complete -c stowage -n '__fish_seen_subcommand_from {}' -l {}{} -d {}\n",
                      command->get_name(), name, option->get_items_expected_max() == 0 ? "" : " -r",
                      quoted(option->get_description()));
  }
  return made;
}

}  // namespace

std::string manual_page(const CLI::App& app) {
  std::string page = formatted(
      ".TH STOWAGE 1 \"\" \"stowage {}\"\n.SH NAME\nstowage \\- {}\n.SH SYNOPSIS\n"
      "\\fBstowage\\fR COMMAND [OPTION...]\n.SH OPTIONS\n",
      version(), roff(app.get_description()));
  describe(app, page);
  for (const CLI::App* command : commands_of(app)) {
    page += formatted(".SH \"stowage {}\"\n{}\n", command->get_name(),
                      roff(command->get_description()));
    describe(*command, page);
    if (!command->get_footer().empty())
      page += formatted(".PP\n.nf\n{}\n.fi\n", roff(command->get_footer()));
  }
  return page + formatted(".SH NOTES\n.nf\n{}\n.fi\n", roff(app.get_footer()));
}

std::string completion_script(const CLI::App& app, const std::string& shell) {
  if (shell == "bash") return bash(app);
  if (shell == "zsh") return "autoload -U +X bashcompinit && bashcompinit\n" + bash(app);
  if (shell == "fish") return fish(app);
  throw UsageError("completion: must be for bash, zsh or fish, got '" + shell + "'");
}

}  // namespace stowage::cli
