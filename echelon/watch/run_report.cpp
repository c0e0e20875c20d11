#include "echelon/watch/run_report.h"

#include <system_error>
#include <utility>

#include "echelon/explain/explain.h"
#include "echelon/explain/run_record.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/watch/run_watch.h"

namespace echelon::watch {
namespace {

std::string outcome_of(const RunView& view) {
  if (view.state == RunState::finished) return "";
  std::string text(to_string(view.state));
  if (view.last) {
    text += format(", step {}", format_count(view.last->step));
    if (view.total_steps > 0) {
      text += " of " + format_count(view.total_steps);
    }
  }
  if (!view.why.empty()) text += ": " + view.why;
  if (!view.failure.empty()) text += ". " + view.failure;
  return text;
}

report::Facts facts_of(const explain::RunRecord& record, const RunView& view) {
  report::Facts facts;
  facts.reserve(8);
  if (record.job) {
    const Job& job = *record.job;
    facts.emplace_back("Model", job.model.name);
    facts.emplace_back("Data", to_string(job.data.name));
    facts.emplace_back("Layout", to_string(job.layout));
    facts.emplace_back("Ranks", format_count(job.layout.num_ranks()));
    facts.emplace_back("Global batch", format_count(job.train.batch));
    facts.emplace_back(
        "Optimizer",
        format(
            "{}, learning rate {:g}", to_string(job.optimizer.name),
            job.optimizer.learning_rate));
    facts.emplace_back("Seed", std::to_string(job.train.seed));
  }
  for (const auto& rollback : record.rollbacks) {
    facts.emplace_back("Rolled back", timeline::to_text(rollback));
  }
  if (view.restarts > 0) {
    facts.emplace_back("Restarts", format_count(view.restarts));
  }
  if (view.checkpoint) {
    facts.emplace_back(
        "Newest checkpoint", format("step {}", view.checkpoint->step));
  }
  return facts;
}

}  // namespace

report::ReportInput report_of(const std::filesystem::path& run) {
  RunWatch watch(run, {.findings = false});
  const RunView& view = watch.look();
  explain::RunRecord record = explain::read_run(run);
  report::ReportInput input;
  input.title = record.title.empty() ? view.name : record.title;
  input.facts = facts_of(record, view);
  input.outcome = outcome_of(view);
  input.interim = true;
  try {
    input.findings = explain::findings_for_page(
        explain::explain_run(run, {.simulation_seconds = 0.5}));
  } catch (const std::exception&) {  // findings are an addition
  }
  input.metrics = std::move(record.steps);
  input.evaluations = std::move(record.evaluations);
  input.timeline = std::move(record.timeline);
  return input;
}

bool write_interim_report(
    const std::filesystem::path& run,
    std::filesystem::file_time_type began) noexcept {
  try {
    const std::string page = report::to_html(report_of(run));
    // The trainer writes timeline.json, looks for findings, and then writes its
    // report: that one comes later than this one, or this one is not written.
    std::error_code none;
    const auto own =
        std::filesystem::last_write_time(run / "timeline.json", none);
    if (!none && own >= began) return false;
    write_file_atomically(run / "report.html", page);
    return true;
  } catch (const std::exception&) {
    return false;  // there is no step yet, or no room
  }
}

}  // namespace echelon::watch
