// SPDX-License-Identifier: Apache-2.0
// The command line: options, help texts with examples, and which function runs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>

#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/compare.h"
#include "cli/manual.h"
#include "cli/plan_arguments.h"
#include "cli/policy_file.h"
#include "cli/text.h"
#include "stowage/dialect.h"
#include "stowage/info.h"

namespace stowage::cli {
namespace {

constexpr const char* kAbout = "Model weights that rest small and work exactly.";
constexpr const char* kExamples = R"(Examples:
  stowage inspect model/                               what a model is made of
  stowage pack model/ packed/ --storage nf4            every Linear, Embedding and Conv weight
  stowage pack model/ packed/ --storage f8_e4m3:row --rule '*.mlp.*=nf4' --compute bf16
  stowage pack llama/ llama-nf4/ --storage nf4 --for bitsandbytes
  stowage convert llama-gptq/ llama-ct/ --to compressed-tensors
  stowage verify packed/
  stowage unpack packed/ plain/ --compute bf16
  stowage plan packed/ --ram 4GiB --accelerator 8GiB   which weight rests where, before loading
  stowage report packed/ --html report.html            bytes by storage and kind, each weight
  stowage bench --quick
  stowage doctor                                       what this machine and its settings cost
  stowage compile --arch 90 --storage nf4              kernels of CUDA devices, ahead

MODEL and IN are a .safetensors file, a .safetensors.index.json, or a folder that holds either.
Exit codes: 0 ok, 1 a problem with a file or I/O, 2 wrong usage.)";
constexpr const char* kPackExamples =
    R"(Rules: the first that matches a weight's name or its module's path decides; without one, floating
weights of Linear, Embedding and Conv shape rest as --storage, norms and heads stay plain.

Examples:
  stowage pack model.safetensors small.safetensors --storage int8:row
  stowage pack model/ packed/ --storage nf4:block64:nested --rule '*embed*=int8:row'
  stowage pack model/ packed/ --rule '*.experts.*=nf4' --rule '*=plain'
  stowage pack llama/ llama-nf4/ --storage nf4 --for bitsandbytes --compute bf16)";
constexpr const char* kConvertExamples = R"(Examples:
  stowage convert llama-gptq/ llama-ct/ --to compressed-tensors
  stowage convert llama/ llama-fp8/ --to fp8 --storage f8_e4m3:block128x128)";
constexpr const char* kUnpackExamples = R"(Examples:
  stowage unpack packed/ plain/ --compute bf16
  stowage unpack small.safetensors model.safetensors)";

std::string version_text() {
  return std::string("stowage ") + version() + " (commit " + commit() + ", " + instruction_set() +
         ", " + std::to_string(thread_count()) + " threads)\n";
}

// What parses a value for CLI11: its refusal is a usage error with our text.
template <class Parse>
auto usage(Parse parse) {
  try {
    return parse();
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

std::optional<Dtype> compute_dtype(const std::string& name, bool f64_too) {
  if (name.empty()) return std::nullopt;
  const auto dtype = value_dtype_from_name(name);
  if (!dtype || (*dtype == Dtype::f64 && !f64_too))
    throw UsageError("--compute: must be " + std::string(f64_too ? "f64, " : "") +
                     "f32, bf16 or f16, got '" + name + "'");
  return dtype;
}

struct Texts {  // options as they were typed
  std::string storage, compute, peer, shard, policy;
  std::vector<std::string> rules, skips;
};

void read_rules(const Texts& texts, PackOptions& options) {
  usage([&] {
    if (!texts.storage.empty()) options.policy.storage = parse_storage(texts.storage);
    for (const std::string& rule : texts.rules) options.policy.rules.push_back(parse_rule(rule));
    if (!texts.shard.empty()) options.shard_bytes = parse_size(texts.shard);
    return true;
  });
}

void read_pack(const Texts& texts, PackOptions& options) {
  const bool said = !texts.storage.empty() || !texts.rules.empty();
  if (!said && texts.policy.empty())
    throw UsageError(
        "pack: must be given --storage, --rule or --policy, got none (stowage pack --help)");
  if (!texts.policy.empty() && (said || !texts.skips.empty() || !texts.compute.empty()))
    throw UsageError("--policy: must come without --storage, --rule, --skip and --compute");
  options.for_bitsandbytes = !texts.peer.empty();
  if (!texts.peer.empty() && texts.peer != "bitsandbytes")
    throw UsageError("--for: must be bitsandbytes, got '" + texts.peer + "'");
  options.policy.linears_only = options.for_bitsandbytes;
  options.compute = compute_dtype(texts.compute, false);
  options.policy.skips = texts.skips;
  read_rules(texts, options);
  if (!texts.policy.empty()) read_policy(texts.policy, options);
}

void add_inspect(CLI::App& app, std::function<void()>& chosen, Texts& texts,
                 InspectOptions& options) {
  auto* command = app.add_subcommand("inspect", "Tensors, storages and bytes of a model");
  command->add_option("MODEL", options.model)->required();
  command->add_option("--compare", texts.storage,
                      "Quantize the weights in these storages; show their bytes and errors");
  command->add_flag("--json", options.json, "Everything, as JSON");
  command->footer(
      "Examples:\n  stowage inspect model/\n  stowage inspect a.safetensors --json\n"
      "  stowage inspect model/ --compare nf4,nf4:block64:nested,int8:row,f8_e4m3:row");
  command->callback([&, command] {
    chosen = [&, command] {
      if (command->count("--compare") != 0)
        options.compare = usage([&] { return parse_storages(texts.storage); });
      inspect(options);
    };
  });
}

void add_pack(CLI::App& app, std::function<void()>& chosen, Texts& texts, PackOptions& options) {
  std::string storages = legal_storages();  // one line for each format
  for (std::size_t at = 0; (at = storages.find(", ", at)) != std::string::npos;)
    storages.replace(at, 2, "\n  ");
  auto* command = app.add_subcommand("pack", "Quantize a model into a new file or folder");
  command->add_option("IN", options.in)->required();
  command->add_option("OUT", options.out, "a new .safetensors file, or a new folder")->required();
  command->add_option("--storage", texts.storage,
                      "How the weights rest: nf4, int8:row, f8_e4m3:row, ... (listed below)");
  command->add_option("--rule", texts.rules, "GLOB=STORAGE or GLOB=plain; may be repeated")
      ->expected(1)
      ->take_all();
  command->add_option("--skip", texts.skips, "GLOB that stays plain whatever a rule says")
      ->expected(1)
      ->take_all();
  command->add_option("--policy", texts.policy,
                      "A file with all of these, as stowage.Policy.to_dict() of Python gives it");
  command->add_option("--compute", texts.compute,
                      "What the weights compute in (f32, bf16, f16); other tensors are cast to it");
  command->add_option("--for", texts.peer, "bitsandbytes: a folder that transformers opens");
  command->add_option("--shard-size", texts.shard, "Split into files of at most this size: 5GB");
  command->add_flag("--keep-nonfinite", options.keep_nonfinite,
                    "Accept NaN and inf in weights that casts, nf4 and fp4 take");
  command->add_flag("--force", options.force, "Replace OUT where it is a file");
  command->add_flag("--json", options.json, "The error report as JSON");
  command->footer("Storages:\n  " + storages + "\n\n" + kPackExamples);
  command->callback([&] {
    chosen = [&] {
      read_pack(texts, options);
      pack(options);
    };
  });
}

void read_convert(const Texts& texts, PackOptions& options) {
  options.policy.linears_only = true;
  options.dialect = texts.peer;
  const std::vector<std::string> all = written_dialects();
  if (std::ranges::count(all, texts.peer) == 0) {
    std::string known;
    for (const std::string& one : all) known += (known.empty() ? "" : ", ") + one;
    throw UsageError("--to: must be one of " + known + ", got '" + texts.peer + "'");
  }
  read_rules(texts, options);
}

void add_convert(CLI::App& app, std::function<void()>& chosen, Texts& texts, PackOptions& options) {
  auto* command = app.add_subcommand("convert", "Write a model in a dialect that others read");
  command->add_option("IN", options.in)->required();
  command->add_option("OUT", options.out, "a new folder, or a new .safetensors file")->required();
  command->add_option("--to", texts.peer, "The dialect (listed below)")->required();
  command->add_option("--storage", texts.storage,
                      "Quantize the weights of linear modules anew; else what rests stays");
  command->add_option("--rule", texts.rules, "GLOB=STORAGE or GLOB=plain; may be repeated")
      ->expected(1)
      ->take_all();
  command->add_option("--shard-size", texts.shard, "Split into files of at most this size: 5GB");
  command->add_flag("--force", options.force, "Replace OUT where it is a file");
  command->add_flag("--json", options.json, "The error report as JSON");
  std::string dialects;
  for (const std::string& one : written_dialects()) dialects += "\n  " + one;
  command->footer("Dialects:" + dialects + "\n\n" + kConvertExamples);
  command->callback([&] {
    chosen = [&] {
      read_convert(texts, options);
      convert(options);
    };
  });
}

void add_unpack(CLI::App& app, std::function<void()>& chosen, Texts& texts,
                UnpackOptions& options) {
  auto* command =
      app.add_subcommand("unpack", "Write the values of a packed model as plain floats");
  command->add_option("IN", options.in)->required();
  command->add_option("OUT", options.out, "a new .safetensors file, or a new folder")->required();
  command->add_option("--compute", texts.compute,
                      "f32, bf16, f16 or f64; without it, what each weight computes in");
  command->add_option("--shard-size", texts.shard, "Split into files of at most this size: 5GB");
  command->add_flag("--force", options.force, "Replace OUT where it is a file");
  command->add_flag("--json", options.json, "What was written, as JSON");
  command->footer(kUnpackExamples);
  command->callback([&] {
    chosen = [&] {
      options.compute = compute_dtype(texts.compute, true);
      if (!texts.shard.empty())
        options.shard_bytes = usage([&] { return parse_size(texts.shard); });
      unpack(options);
    };
  });
}

void add_verify(CLI::App& app, std::function<void()>& chosen, VerifyOptions& options) {
  auto* command = app.add_subcommand("verify", "Check a model's structure and its checksums");
  command->add_option("MODEL", options.model)->required();
  command->add_flag("--json", options.json, "What was found, as JSON");
  command->footer("Examples:\n  stowage verify packed/\n  stowage verify packed/ --json");
  command->callback([&] { chosen = [&] { verify(options); }; });
}

void add_plan(CLI::App& app, std::function<void()>& chosen, PlanTexts& texts,
              PlanCommand& planning) {
  auto* command = app.add_subcommand("plan", "Which weight rests where, and what a pass will take");
  add_plan_options(*command, texts, planning);
  command->footer(
      "No tensor is read. The rates of this machine are measured once (stowage bench --links).\n\n"
      "Examples:\n  stowage plan packed/ --ram 4GiB\n"
      "  stowage plan model/ --ram 16GiB --accelerator 8GiB --storage nf4 --rows 512 -o plan.json");
  command->callback([&] {
    chosen = [&] {
      usage([&] {
        read_plan(texts, planning);
        return true;
      });
      plan(planning);
    };
  });
}

void add_report(CLI::App& app, std::function<void()>& chosen, ReportCommand& reporting) {
  auto* command = app.add_subcommand("report", "Bytes by storage and by kind, and each weight");
  command->add_option("MODEL", reporting.model)->required();
  command->add_option("--plan", reporting.plan, "A plan of it (stowage plan -o): tiers, a pass");
  command->add_option("--measured", reporting.measured,
                      "What passes took (stowage.measured(model).save): beside what was predicted");
  command->add_option("--html", reporting.html, "Write a page with pictures to this file");
  command->add_flag("--json", reporting.json, "Everything, as JSON");
  command->footer(
      "Examples:\n  stowage report packed/\n"
      "  stowage report packed/ --plan plan.json --measured measured.json --html report.html");
  command->callback([&] { chosen = [&] { report(reporting); }; });
}

void add_doctor(CLI::App& app, std::function<void()>& chosen, DoctorOptions& options) {
  auto* command = app.add_subcommand("doctor", "What this machine and its settings cost");
  command->add_option("MODEL", options.model, "A model that is to be opened here");
  command->add_flag("--json", options.json, "Everything, as JSON");
  command->footer("Examples:\n  stowage doctor\n  stowage doctor packed/ --json");
  command->callback([&] { chosen = [&] { doctor(options); }; });
}

void add_bench(CLI::App& app, std::function<void()>& chosen, BenchOptions& options) {
  auto* command = app.add_subcommand("bench", "Kernels beside the limits of this machine");
  add_bench_options(*command, options);
  command->footer("Examples:\n  stowage bench --quick --json\n  stowage bench --links model/");
  command->callback([&] { chosen = [&] { bench(options); }; });
}

void add_compile(CLI::App& app, std::function<void()>& chosen, CompileOptions& options) {
  auto* command = app.add_subcommand("compile", "Kernels of CUDA devices, before they are needed");
  command->add_option("--storage", options.storages, "Storages of weights")->required();
  command->add_option("--arch", options.architectures, "Compute capabilities: 90 for 9.0")
      ->required()
      ->delimiter(',');
  command
      ->add_option("--rows", options.rows,
                   "Rows of x, of products; else all from 1 to 16, and more")
      ->delimiter(',')
      ->check(CLI::Range(1, 16));
  command->add_option("--dtype", options.dtype, "What is computed in: f32, bf16 or f16");
  command->add_option("--compiler", options.compiler, "NVRTC, a path of libnvrtc.so");
  command->add_option("--to", options.to, "A folder; else the one where they are looked for");
  command->add_flag("--ptx", options.ptx, "Print PTX instead, to be read");
  command->add_flag("--json", options.json, "Each program, as JSON");
  command->footer("Example:\n  stowage compile --arch 80,90 --storage nf4 --storage f8_e4m3:row");
  command->callback([&] { chosen = [&] { compile(options); }; });
}

void add_manual(CLI::App& app, std::function<void()>& chosen, std::string& shell) {
  auto* manual = app.add_subcommand("manual", "All of this help as a page for man");
  manual->footer("Example:\n  stowage manual > stowage.1; man ./stowage.1");
  manual->callback([&] { chosen = [&] { print(manual_page(app)); }; });
  auto* completion = app.add_subcommand("completion", "A script by which a shell completes it");
  completion->add_option("SHELL", shell, "bash, zsh or fish")->required();
  completion->footer("Example:\n  eval \"$(stowage completion bash)\"");
  completion->callback([&] { chosen = [&] { print(completion_script(app, shell)); }; });
}

}  // namespace

int run(int argc, const char* const* argv) {
  CLI::App app(kAbout, "stowage");
  app.footer(kExamples);
  bool wants_version = false;
  app.add_flag("--version", wants_version, "Version, commit, instruction set and threads");
  app.require_subcommand(0, 1);
  std::function<void()> chosen;
  InspectOptions inspecting;
  PackOptions packing, converting;
  UnpackOptions unpacking;
  VerifyOptions verifying;
  BenchOptions benching;
  DoctorOptions checking;
  CompileOptions compiling;
  PlanCommand planning;
  PlanTexts plan_texts;
  ReportCommand reporting;
  Texts inspect_texts, pack_texts, convert_texts, unpack_texts;
  add_inspect(app, chosen, inspect_texts, inspecting);
  add_pack(app, chosen, pack_texts, packing);
  add_convert(app, chosen, convert_texts, converting);
  add_unpack(app, chosen, unpack_texts, unpacking);
  add_verify(app, chosen, verifying);
  add_plan(app, chosen, plan_texts, planning);
  add_report(app, chosen, reporting);
  add_bench(app, chosen, benching);
  add_doctor(app, chosen, checking);
  add_compile(app, chosen, compiling);
  std::string shell;
  add_manual(app, chosen, shell);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::string message = error.what();
    std::ranges::replace(message, '\n', ' ');
    throw UsageError(message + " (see stowage --help)");
  }
  if (wants_version)
    print(version_text());
  else if (chosen)
    chosen();
  else
    throw UsageError(
        "must be given a command: inspect, pack, convert, unpack, verify, plan, report, bench, "
        "doctor, compile, manual or completion (see stowage --help)");
  return kExitOk;
}

}  // namespace stowage::cli
