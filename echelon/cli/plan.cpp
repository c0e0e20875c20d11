#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/help.h"
#include "echelon/cli/job_flags.h"
#include "echelon/cli/plan_print.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/stack.h"
#include "echelon/error.h"
#include "echelon/planner/configuration.h"
#include "echelon/planner/plan.h"
#include "echelon/planner/plan_page.h"
#include "echelon/text/nearest.h"

namespace echelon::cli {
namespace {

const std::vector<std::string> kObjectives = {"time", "cost", "devices"};
constexpr int64_t kMostKept = 100;
constexpr int64_t kMostSamples = int64_t{1} << 30;

struct PlanArguments : JobFlags {
  std::vector<std::string> fix;
  std::string objective = "time";
  std::string keep;
  std::string explain;
  std::string html;
  std::string output;
  bool json = false;
};

[[noreturn]] void missing(const char* flag, const char* what) {
  throw ConfigError(
      std::string("echelon plan: ") + flag + " is missing: " + what);
}

Objective objective_of(const std::string& text) {
  for (size_t i = 0; i < kObjectives.size(); ++i) {
    if (text == kObjectives[i]) return static_cast<Objective>(i);
  }
  throw ConfigError(
      "--objective " + text + ": must be time, cost or devices" +
      config::did_you_mean(text, kObjectives));
}

std::pair<std::string, std::string> parse_fix(const std::string& text) {
  const size_t at = text.find('=');
  if (at == std::string::npos || at == 0 || at + 1 == text.size()) {
    throw ConfigError(
        "--fix " + text +
        ": write KEY=VALUE, as in --fix tp=8 or --fix "
        "recompute=none");
  }
  return {text.substr(0, at), text.substr(at + 1)};
}

PlanRequest request_of(const PlanArguments& arguments) {
  if (arguments.model.empty()) {
    missing("--model", "what is trained, as in --model llama3.1-8b");
  }
  if (arguments.cluster.empty()) {
    missing("--cluster", "what it runs on, as in --cluster h100-sxm:64");
  }
  if (arguments.batch.empty()) {
    missing("--batch", "the samples of one step, as in --batch 1024");
  }
  PlanRequest request;
  request.model = find_model(arguments.model);
  request.cluster = find_cluster(arguments.cluster);
  request.global_batch =
      parse_count("--batch", arguments.batch, 1, kMostSamples);
  if (!arguments.seq_len.empty()) {
    request.seq_len =
        parse_count("--seq-len", arguments.seq_len, 1, kMostSamples);
  }
  request.objective = objective_of(arguments.objective);
  for (const auto& text : arguments.fix) {
    request.fixed.push_back(parse_fix(text));
  }
  request.precision = arguments.precision.empty()
                          ? usual_precision(request.cluster)
                          : precision_from_name(arguments.precision);
  if (!arguments.stack.empty()) {
    request.stack = find_stack(arguments.stack).name;
  }
  if (!arguments.keep.empty()) {
    request.keep = parse_count("--keep", arguments.keep, 1, kMostKept);
  }
  return request;
}

void write_file(
    const std::string& flag, const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) {
    throw ConfigError(
        flag + " " + path + ": cannot be written: " + std::strerror(errno));
  }
}

PlanStyle terminal_style() {
  PlanStyle style{.colours = has_colours(1)};
  style.columns = std::min<size_t>(120, terminal_columns(style.columns));
  return style;
}

int explain(const PlanArguments& arguments, const PlanRequest& request) {
  const auto rows = explain_key(request, arguments.explain);
  if (arguments.json) {
    print_alternatives_json(request, arguments.explain, rows, std::cout);
  } else {
    print_alternatives_text(
        request, arguments.explain, rows, terminal_style(), std::cout);
  }
  return 0;
}

int make_plan(const PlanArguments& arguments) {
  const PlanRequest request = request_of(arguments);
  if (!arguments.explain.empty()) return explain(arguments, request);
  const PlanResult result = plan(request);
  if (arguments.json) {
    print_plan_json(request, result, std::cout);
  } else {
    print_plan_text(request, result, terminal_style(), std::cout);
  }
  const bool fits = !result.plans.empty();
  if (fits && !arguments.output.empty()) {
    write_file(
        "--output", arguments.output,
        to_configuration(result.plans.front(), request));
  }
  if (!arguments.html.empty() && (fits || result.closest)) {
    write_file(
        "--html", arguments.html, to_html(make_plan_page(request, result)));
  }
  return fits ? 0 : static_cast<int>(ExitCode::failure);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : "|") + word;
  return text;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "plan",
      "which layout trains a model on a cluster, how long a step takes, what "
      "it needs, and why");
  command->footer(
      "echelon plan --model gpt3-175b --cluster a100-80gb:1024 --batch 1536\n"
      "echelon plan --model llama3-8b --cluster h100-sxm:8 --batch 64 "
      "--output my.toml\n"
      "echelon plan --model llama2-70b --cluster h100-sxm:64 --batch 512 --fix "
      "tp=4\n"
      "echelon plan --model llama2-70b --cluster h100-sxm:64 --batch 512 "
      "--explain pp\n"
      "echelon plan --model llama3-70b --cluster h100-sxm:64 --batch 512 "
      "--html my.html");
  auto arguments = std::make_shared<PlanArguments>();
  const auto option = [&](const char* name, auto& value, const char* help,
                          const std::string& type) {
    command->add_option(name, value, help)->type_name(type);
  };
  add_job_flags(*command, *arguments);
  option(
      "--fix", arguments->fix,
      "keeps to this, as in tp=8 or schedule=1f1b; may be repeated",
      "KEY=VALUE");
  option(
      "--objective", arguments->objective,
      "the shortest step, the cheapest one, or the fewest devices that do "
      "(time)",
      joined(kObjectives));
  option("--keep", arguments->keep, "layouts to show (5)", "NUMBER");
  option(
      "--explain", arguments->explain,
      "the best plan for each value of one setting, and why it is not the "
      "best of all",
      "KEY");
  option(
      "--output", arguments->output,
      "writes the best as a configuration of echelon train", "CONFIG.toml");
  option(
      "--html", arguments->html,
      "draws it as a page: memory, the step, the choices, more devices",
      "FILE");
  command->add_flag("--json", arguments->json, "prints everything as JSON");
  command->callback([&action, arguments] {
    action = [arguments] { return make_plan(*arguments); };
  });
}

}  // namespace echelon::cli
