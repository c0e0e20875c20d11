#include <algorithm>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/cli/command_line.h"
#include "echelon/cli/new_folder.h"
#include "echelon/error.h"
#include "echelon/explain/run_record.h"
#include "echelon/report/strategy_page.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct CompareArguments {
  std::vector<std::string> runs;
  std::string out = "compare.html";
  std::string title = "Runs side by side";
  std::vector<std::string> verified;  // what `verify --json` printed
  std::vector<std::string> planned;   // what `plan --json` printed
};

// The last part of the folder's path, or all of it where two runs share that.
std::vector<std::string> names_of(const std::vector<std::string>& runs) {
  std::vector<std::string> names;
  std::map<std::string, int> counts;
  for (const auto& run : runs) {
    const fs::path folder = fs::absolute(run).lexically_normal();
    const fs::path last = folder.filename();
    names.push_back(
        (last.empty() ? folder.parent_path().filename() : last).string());
    ++counts[names.back()];
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    if (counts[names[i]] > 1) names[i] = runs[i];
  }
  return names;
}

// All settings but the folder, which is the run's name.
std::vector<std::pair<std::string, std::string>> settings_of(const Job& job) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (const auto& entry : job.document.entries()) {
    if (entry.table == "train" && entry.key == "run") continue;
    settings.emplace_back(entry.table + "." + entry.key, entry.value);
  }
  return settings;
}

report::StrategyRun
read(const fs::path& folder, const std::string& name, const fs::path& page) {
  explain::RunRecord record = explain::read_run(folder);
  report::StrategyRun run{
      .name = name,
      .notes = std::move(record.notes),
      .metrics = std::move(record.steps),
      .evaluations = std::move(record.evaluations),
      .timeline = std::move(record.timeline)};
  if (record.job) {
    run.layout = record.job->layout;
    run.zero_stage = record.job->shard.stage;
    run.settings = settings_of(*record.job);
  }
  const fs::path report = folder / "report.html";
  std::error_code error;
  if (fs::is_regular_file(report, error)) {
    run.link =
        fs::proximate(fs::absolute(report), fs::absolute(page).parent_path())
            .generic_string();
  }
  return run;
}

// Reads a file that another command printed with --json.
template <class Read>
auto from_json(const std::string& path, const char* command, Read read) {
  try {
    return read(nlohmann::json::parse(read_text_file(path)));
  } catch (const nlohmann::json::exception&) {
    throw ConfigError(format(
        "{}: is not what `echelon {} --json` prints; write it with `echelon "
        "{} … --json > FILE`",
        path, command, command));
  }
}

report::VerifiedLayout verified_layout(const nlohmann::json& json) {
  report::VerifiedLayout one{
      .layout = json.at("layout"),
      .passed = json.at("passed"),
      .steps = json.at("steps"),
      .num_compared = json.at("compared")};
  for (const auto& difference : json.at("worst")) {
    const auto& relative = difference.at("relative");
    one.largest = std::max(
        one.largest, relative.is_number()
                         ? relative.get<double>()
                         : std::numeric_limits<double>::infinity());
  }
  return one;
}

report::PlannedLayout planned_layout(const nlohmann::json& json) {
  const auto& plan = json.at("plans").at(0);
  return {
      .model = json.at("model"),
      .cluster = json.at("cluster"),
      .layout = plan.at("strategy").at("text"),
      .step_seconds = plan.at("step_seconds"),
      .mfu = plan.at("model_flops_utilisation"),
      .peak_bytes = plan.at("memory").at("peak_bytes")};
}

int compare(const CompareArguments& arguments) {
  report::StrategyPage page{.title = arguments.title};
  const auto names = names_of(arguments.runs);
  for (size_t i = 0; i < names.size(); ++i) {
    page.runs.push_back(read(arguments.runs[i], names[i], arguments.out));
  }
  for (const auto& path : arguments.verified) {
    page.verified.push_back(from_json(path, "verify", verified_layout));
  }
  for (const auto& path : arguments.planned) {
    page.planned.push_back(from_json(path, "plan", planned_layout));
  }
  check_parent(arguments.out);
  report::write_strategy_page(arguments.out, page);
  std::cout << "report: " << arguments.out << "\n";
  return 0;
}

}  // namespace

void add_compare(Command& root) {
  auto [command, arguments] = root.add(
      "compare",
      "compare runs on one page: their figures in a table, their loss curves, "
      "what differs in their configurations, and a drawing of a typical step",
      "echelon compare runs/one runs/two\n"
      "echelon compare runs/* -o compare.html --title 'Digits, three ways'",
      compare);
  command.positionals("RUN", arguments.runs, "run folders");
  command.option(
      "-o,--output", arguments.out, "FILE",
      "the page to write (default: compare.html)");
  command.option("--title", arguments.title, "TEXT", "heading of the page");
  command.repeated_option(
      "--verified", arguments.verified, "FILE",
      "shows what `echelon verify --json` printed; may be repeated");
  command.repeated_option(
      "--planned", arguments.planned, "FILE",
      "shows the best plan that `echelon plan --json` printed; may be "
      "repeated");
}

}  // namespace echelon::cli
