#include <filesystem>
#include <iostream>
#include <map>
#include <utility>

#include "echelon/cli/command_line.h"
#include "echelon/cli/new_folder.h"
#include "echelon/explain/run_record.h"
#include "echelon/report/strategy_page.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct CompareArguments {
  std::vector<std::string> runs;
  std::string out = "compare.html";
  std::string title = "Runs side by side";
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

int compare(const CompareArguments& arguments) {
  report::StrategyPage page{.title = arguments.title};
  const auto names = names_of(arguments.runs);
  for (size_t i = 0; i < names.size(); ++i) {
    page.runs.push_back(read(arguments.runs[i], names[i], arguments.out));
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
}

}  // namespace echelon::cli
