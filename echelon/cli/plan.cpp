#include <algorithm>
#include <iostream>
#include <optional>
#include <utility>

#include "echelon/cli/arguments.h"
#include "echelon/cli/plan_text.h"
#include "echelon/cli/replans.h"
#include "echelon/cli/terminal.h"
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
  // Of a job that `echelon train` runs, instead of model and batch.
  JobArguments job;
  std::vector<std::string> fix;
  std::string objective = "time";
  std::string keep;
  std::string explain;
  std::string html;
  std::string output;
  std::string free = "8";
  std::string elastic;
  bool json = false;
  bool verbose = false;
};

planner::Objective objective_of(const std::string& text) {
  check_choice("--objective", text, kObjectives);
  const auto at = std::ranges::find(kObjectives, text) - kObjectives.begin();
  return static_cast<planner::Objective>(at);
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

planner::PlanRequest request_of(const PlanArguments& arguments) {
  const std::pair<const std::string&, const char*> needed[] = {
      {arguments.model,
       "--model is missing: what is trained, as in --model llama3.1-8b"},
      {arguments.cluster,
       "--cluster is missing: what it runs on, as in --cluster h100-sxm:64"},
      {arguments.batch,
       "--batch is missing: the samples of one step, as in --batch 1024"}};
  for (const auto& [flag, text] : needed) {
    if (flag.empty()) throw ConfigError(format("echelon plan: {}", text));
  }
  planner::PlanRequest request;
  request.model = cost::find_model(arguments.model);
  request.model.expert_load =
      parse_expert_load(arguments.expert_load, request.model);
  request.free_share =
      static_cast<double>(parse_count("--free", arguments.free, 0, 90)) / 100;
  request.cluster = planner::with_free_memory(
      cluster::find_cluster(arguments.cluster), request.free_share);
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
                          ? planner::usual_precision(request.cluster)
                          : cluster::precision_from_name(arguments.precision);
  if (!arguments.stack.empty()) {
    request.framework = cost::find_framework(arguments.stack).name;
  }
  if (!arguments.keep.empty()) {
    request.keep = parse_count("--keep", arguments.keep, 1, kMostKept);
  }
  return request;
}

int explain_plan(
    const PlanArguments& arguments, const planner::PlanRequest& request) {
  const auto rows = planner::explain_key(request, arguments.explain);
  if (arguments.json) {
    print_alternatives_json(request, arguments.explain, rows);
  } else {
    print_alternatives_text(request, arguments.explain, rows);
  }
  return 0;
}

// "2:8" -> 2, 8
std::pair<int64_t, int64_t> sizes_of(const std::string& range, int64_t most) {
  const size_t colon = range.find(':');
  if (colon == std::string::npos) {
    throw ConfigError(format(
        "--elastic {}: write the fewest and the most devices, as in "
        "--elastic 2:8",
        range));
  }
  const int64_t low = parse_count("--elastic", range.substr(0, colon), 1, most);
  const int64_t high =
      parse_count("--elastic", range.substr(colon + 1), 1, most);
  if (high < low) {
    throw ConfigError(format(
        "--elastic {}: the most devices come second, as in --elastic {}:{}",
        range, high, low));
  }
  return {low, high};
}

// The layouts that a job of `echelon train` takes when its number of ranks
// changes.
int plan_job(const PlanArguments& arguments) {
  const std::string& path = arguments.job.path;
  if (arguments.elastic.empty()) {
    throw ConfigError(format(
        "echelon plan {}: --elastic MIN:MAX is missing, the fewest and the "
        "most ranks that the job may have; without a configuration, --model "
        "says what is planned",
        path));
  }
  const std::pair<const char*, bool> others[] = {
      {"--model", !arguments.model.empty()},
      {"--batch", !arguments.batch.empty()},
      {"--seq-len", !arguments.seq_len.empty()},
      {"--precision", !arguments.precision.empty()},
      {"--stack", !arguments.stack.empty()},
      {"--expert-load", !arguments.expert_load.empty()},
      {"--fix", !arguments.fix.empty()},
      {"--explain", !arguments.explain.empty()},
      {"--keep", !arguments.keep.empty()},
      {"--html", !arguments.html.empty()},
      {"--output", !arguments.output.empty()}};
  for (const auto& [flag, given] : others) {
    if (!given) continue;
    throw ConfigError(format(
        "{} with {}: the configuration says what is trained; leave one out",
        flag, path));
  }
  std::optional<cluster::Cluster> cluster;
  if (!arguments.cluster.empty()) {
    cluster = cluster::find_cluster(arguments.cluster);
  }
  const auto [low, high] = sizes_of(
      arguments.elastic,
      cluster ? cluster->num_devices() : kMaxRanks * kMaxRanks);
  RankCounts counts{.low = low, .high = high};
  JobArguments named = arguments.job;
  if (!named.num_ranks.empty()) {
    counts.per_host = parse_count("-n", named.num_ranks, 1, kMaxRanks);
    if (low % counts.per_host != 0 || high % counts.per_host != 0) {
      throw ConfigError(format(
          "--elastic {}: hosts of -n {} ranks each come and go; give "
          "multiples of {}",
          arguments.elastic, counts.per_host, counts.per_host));
    }
  }
  named.overrides.num_ranks = high;
  named.num_ranks.clear();
  const Job job = load(named);
  const JobFacts facts = check_job(job, job.layout.num_ranks());
  return print_replans(
      job, facts, counts, cluster ? &*cluster : nullptr, arguments.json);
}

// The plans of a model whose number of devices changes while it is trained.
int plan_sizes(
    const PlanArguments& arguments, const planner::PlanRequest& request) {
  const auto [low, high] =
      sizes_of(arguments.elastic, request.cluster.num_devices());
  std::vector<planner::Alternative> rows;
  bool fits = false;
  for (int64_t devices = low; devices <= high; ++devices) {
    planner::Alternative row{std::to_string(devices), std::nullopt, ""};
    auto plans = planner::plans_on(request, devices, 1);
    if (plans.empty()) {
      row.because = "nothing fits";
    } else {
      row.plan = std::move(plans.front());
      fits = true;
    }
    rows.push_back(std::move(row));
  }
  if (arguments.json) {
    print_alternatives_json(request, "devices", rows);
  } else {
    print_sizes_text(request, rows);
  }
  return fits ? 0 : static_cast<int>(ExitCode::failure);
}

int make_plan(const PlanArguments& arguments) {
  if (!arguments.job.path.empty()) return plan_job(arguments);
  const planner::PlanRequest request = request_of(arguments);
  if (!arguments.elastic.empty()) return plan_sizes(arguments, request);
  if (!arguments.explain.empty()) return explain_plan(arguments, request);
  const planner::PlanResult result = planner::plan(request);
  if (arguments.json) {
    print_plan_json(request, result);
  } else {
    print_plan_text(request, result, arguments.verbose);
  }
  const auto write = [](const char* flag, const std::string& path,
                        const std::string& text) {
    write_output(flag, path, [&](std::ostream& out) { out << text; });
  };
  const bool fits = !result.plans.empty();
  if (fits && !arguments.output.empty()) {
    write(
        "--output", arguments.output,
        planner::to_configuration(result.plans.front(), request));
  }
  if (!arguments.html.empty()) {
    write(
        "--html", arguments.html,
        planner::to_html(planner::make_plan_page(request, result)));
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
      "--html my.html\n"
      "echelon plan --model llama3-8b --cluster h100-sxm:8 --batch 48 "
      "--elastic 2:8\n"
      "echelon plan first.toml --elastic 1:8   the layouts of echelon job "
      "resize\n"
      "echelon plan first.toml -n 8 --elastic 16:32   of hosts that come and "
      "go",
      make_plan);
  JobArguments& job = arguments.job;
  command.optional_positional(
      "CONFIG.toml", job.path,
      "with --elastic: a configuration of echelon train, instead of --model "
      "and --batch; --cluster is this machine unless given");
  command.option(
      "-n", job.num_ranks, "RANKS",
      "with CONFIG.toml: the ranks of each host of a job whose hosts come and "
      "go (default: all ranks are on one host)");
  command.option(
      "--layout", job.overrides.layout, "AXIS=DEGREE,…",
      "with CONFIG.toml: the layout at the start, in place of [layout] "
      "(default: dp of the most ranks)");
  command.repeated_option(
      "--set", job.overrides.set, "TABLE.KEY=VALUE",
      "with CONFIG.toml: override a value of it; may be repeated");
  add_job_flags(command, arguments);
  command.option(
      "--fix", arguments.fix, "KEY=VALUE",
      "fix a setting, as in tp=8 or schedule=1f1b; may be repeated");
  command.option(
      "--objective", arguments.objective, join(kObjectives, "|"),
      "the shortest step, the cheapest step, or the fewest devices that "
      "suffice (default: time)");
  command.option(
      "--free", arguments.free, "PERCENT",
      "memory of each device that stays free, for what formulas do not know "
      "(default: 8)");
  command.option(
      "--keep", arguments.keep, "NUMBER", "layouts to show (default: 5)");
  command.option(
      "--explain", arguments.explain, "KEY",
      "the best plan for each value of one setting, and why it is not the best "
      "of all");
  command.option(
      "--elastic", arguments.elastic, "MIN:MAX",
      "the best layout for each number of devices; with CONFIG.toml those that "
      "the job takes when its number of ranks changes (echelon job resize)");
  command.option(
      "--output", arguments.output, "CONFIG.toml",
      "write the best plan as a configuration for echelon train");
  command.option(
      "--html", arguments.html, "FILE",
      "write a page with drawings: memory, the step, the choices, more "
      "devices");
  command.flag(
      "--verbose", arguments.verbose,
      "print the parts of each layout's step, the memory, the configuration "
      "and "
      "why other layouts are slower");
  command.flag("--json", arguments.json, "print everything as JSON");
}

}  // namespace echelon::cli
