#include "echelon/train/report_writer.h"

#include <cstdio>

#include "echelon/job/pipeline_schedule.h"
#include "echelon/report/report.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/gather_spans.h"

namespace echelon {
namespace {

std::string rank_name(const World& world) {
  return "rank " + std::to_string(world.rank()) + " (" + world.device().str() +
         ")";
}

/// Rank 0's clock minus ours, for hosts that do not share one: half a round
/// trip over the store is as near as a picture needs.
int64_t clock_offset(World& world) {
  world.group().barrier({.label = "clock"});
  const auto clocks = world.exchange(std::to_string(steady_now_ns()));
  if (world.local_size() == world.size()) return 0;
  return std::stoll(clocks[0]) -
         std::stoll(clocks[static_cast<size_t>(world.rank())]);
}

std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (int64_t i = static_cast<int64_t>(text.size()) - 3; i > 0; i -= 3) {
    text.insert(static_cast<size_t>(i), 1, ' ');
  }
  return text;
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// "float32", "bf16, master parameters float32, sums over ranks float32"
std::string precision_text(const Job& job) {
  const auto& precision = job.precision;
  const bool low = precision.compute != "same";
  std::string text =
      low ? precision.compute + ", master parameters " + job.model.dtype
          : job.model.dtype;
  if (precision.reduce != "same") {
    text += ", sums over ranks " + precision.reduce;
  }
  return text;
}

// "stage 3: parameters, gradients and optimizer state over 4 ranks"
std::string sharding_text(const Job& job) {
  const char* what[] = {
      "optimizer state", "gradients and optimizer state",
      "parameters, gradients and optimizer state"};
  return "stage " + std::to_string(job.shard.stage) + ": " +
         what[job.shard.stage - 1] + " over " +
         std::to_string(job.layout.dp_shard) + " ranks";
}

// "3, training stood still for 0.04 s, 0.1 % of its time"
std::string checkpoints_text(const RunSummary& summary) {
  char text[96];
  std::snprintf(
      text, sizeof(text),
      "%lld, training stood still for %.2g s, %.1f %% of "
      "its time",
      static_cast<long long>(summary.checkpoints), summary.checkpoint_seconds,
      summary.seconds > 0 ? 100 * summary.checkpoint_seconds / summary.seconds
                          : 0.0);
  return text;
}

std::vector<std::pair<std::string, std::string>>
facts(const Job& job, const World& world, const RunSummary& summary) {
  std::vector<std::pair<std::string, std::string>> list;
  list.emplace_back("Model", job.model.name);
  list.emplace_back("Parameters", grouped(summary.num_parameters));
  list.emplace_back("Data", job.data.name);
  list.emplace_back("Layout", to_string(job.layout));
  if (job.layout.pp > 1) {
    const std::string name = job.pipeline.schedule_file.empty()
                                 ? job.pipeline.schedule
                                 : job.pipeline.schedule_file;
    list.emplace_back(
        "Pipeline",
        name + ", " + std::to_string(microbatches_of(job)) + " microbatches");
  }
  if (job.layout.dp_shard > 1) {
    list.emplace_back("Sharding", sharding_text(job));
  }
  for (const auto& line : summary.cut) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;  // the sum of all
    list.emplace_back(line.substr(0, colon), line.substr(colon + 2));
  }
  list.emplace_back(
      "Ranks", std::to_string(world.size()) + " (" + job.train.ranks + ", " +
                   world.backend() + ")");
  list.emplace_back("Device", world.device().str());
  list.emplace_back("Global batch", std::to_string(job.train.batch));
  list.emplace_back(
      "Optimizer", job.optimizer.name + ", learning rate " +
                       number_text(job.optimizer.learning_rate));
  list.emplace_back("Precision", precision_text(job));
  list.emplace_back("Seed", std::to_string(job.train.seed));
  if (!summary.resumed.empty()) {
    list.emplace_back("Went on from", summary.resumed);
  }
  if (summary.checkpoints > 0) {
    list.emplace_back("Checkpoints", checkpoints_text(summary));
  }
  if (summary.skipped_steps > 0) {
    list.emplace_back(
        "Steps skipped",
        grouped(summary.skipped_steps) + ", gradients were not finite");
  }
  if (summary.skipped > 0) {
    list.emplace_back("Samples skipped", std::to_string(summary.skipped));
  }
  return list;
}

}  // namespace

void write_run_report(
    const Job& job, World& world, const std::filesystem::path& folder,
    std::vector<Span> spans, const RunSummary& summary) {
  auto ranks = gather_spans(
      world, {.rank = world.rank(),
              .rank_name = rank_name(world),
              .clock_offset_ns = clock_offset(world),
              .spans = std::move(spans),
              .memory = summary.memory});
  if (world.rank() != 0) return;
  ReportInput input;
  input.title = job.model.name + " on " + job.data.name;
  input.facts = facts(job, world, summary);
  input.metrics = summary.steps;
  input.evaluations = summary.evaluations;
  input.timeline = merge_spans(std::move(ranks), input.title);
  input.tensor = summary.tensor;
  input.total_seconds = summary.seconds;
  input.outcome = summary.outcome;
  if (summary.predict) input.prediction = summary.predict();
  write_chrome_trace(folder / "timeline.json", input.timeline);
  write_report(folder / "report.html", input);
}

}  // namespace echelon
