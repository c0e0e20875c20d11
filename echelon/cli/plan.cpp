#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>

#include "echelon/cli/arguments.h"
#include "echelon/cli/plan_print.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/error.h"
#include "echelon/planner/configuration.h"
#include "echelon/planner/plan.h"
#include "echelon/planner/plan_page.h"
#include "echelon/text/format.h"

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
  throw ConfigError(format("echelon plan: {} is missing: {}", flag, what));
}

Objective objective_of(const std::string& text) {
  check_choice("--objective", text, kObjectives);
  const auto at = std::ranges::find(kObjectives, text) - kObjectives.begin();
  return static_cast<Objective>(at);
}

std::pair<std::string, std::string> parse_fix(const std::string& text) {
  const size_t at = text.find('=');
  if (at == std::string::npos || at == 0 || at + 1 == text.size()) {
    throw ConfigError(
        "--fix " + text +
        ": write KEY=VALUE, as in --fix tp=8 or --fix recompute=none");
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
    request.stack = find_framework(arguments.stack).name;
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

Style plan_style() {
  Style style = terminal_style(100);
  style.columns = std::min<size_t>(style.columns, 120);
  return style;
}

int explain_plan(const PlanArguments& arguments, const PlanRequest& request) {
  const auto rows = explain_key(request, arguments.explain);
  if (arguments.json) {
    print_alternatives_json(request, arguments.explain, rows, std::cout);
  } else {
    print_alternatives_text(
        request, arguments.explain, rows, plan_style(), std::cout);
  }
  return 0;
}

int make_plan(const PlanArguments& arguments) {
  const PlanRequest request = request_of(arguments);
  if (!arguments.explain.empty()) return explain_plan(arguments, request);
  const PlanResult result = plan(request);
  if (arguments.json) {
    print_plan_json(request, result, std::cout);
  } else {
    print_plan_text(request, result, plan_style(), std::cout);
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

}  // namespace

void add_plan(Command& root) {
  auto [command, arguments] = root.add(
      "plan",
      "find the layout that trains a model fastest on a cluster: step time, "
      "memory, and the reasons",
      "echelon plan --model gpt3-175b --cluster a100-80gb:1024 --batch 1536\n"
      "echelon plan --model llama3-8b --cluster h100-sxm:8 --batch 64 "
      "--output my.toml\n"
      "echelon plan --model llama2-70b --cluster h100-sxm:64 --batch 512 --fix "
      "tp=4\n"
      "echelon plan --model llama2-70b --cluster h100-sxm:64 --batch 512 "
      "--explain pp\n"
      "echelon plan --model llama3-70b --cluster h100-sxm:64 --batch 512 "
      "--html my.html",
      make_plan);
  add_job_flags(command, arguments);
  command.option(
      "--fix", arguments.fix, "KEY=VALUE",
      "fix a setting, as in tp=8 or schedule=1f1b; may be repeated");
  command.option(
      "--objective", arguments.objective, joined(kObjectives, "|"),
      "the shortest step, the cheapest step, or the fewest devices that "
      "suffice (default: time)");
  command.option(
      "--keep", arguments.keep, "NUMBER", "layouts to show (default: 5)");
  command.option(
      "--explain", arguments.explain, "KEY",
      "the best plan for each value of one setting, and why it is not the best "
      "of all");
  command.option(
      "--output", arguments.output, "CONFIG.toml",
      "write the best plan as a configuration for echelon train");
  command.option(
      "--html", arguments.html, "FILE",
      "write a page with drawings: memory, the step, the choices, more "
      "devices");
  command.flag("--json", arguments.json, "print everything as JSON");
}

}  // namespace echelon::cli
