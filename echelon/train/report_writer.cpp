#include "echelon/train/report_writer.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "echelon/counting/meta_mode.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/report/report.h"
#include "echelon/text/format.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/gather_spans.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

std::string rank_name(const World& world) {
  return format("rank {} ({})", world.rank(), world.device().str());
}

/// Rank 0's clock minus ours, for hosts with different clocks: half a round
/// trip over the store is accurate enough for a drawing.
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
  return format(
      "stage {}: {} over {} ranks", job.shard.stage, what[job.shard.stage - 1],
      job.layout.dp_shard);
}

// "3, training waited 0.04 s for them, 0.1 % of its time"
std::string checkpoints_text(const RunSummary& summary) {
  char text[96];
  std::snprintf(
      text, sizeof(text),
      "%lld, training waited %.2g s for them, %.1f %% of its time",
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
        "Pipeline", format("{}, {} microbatches", name, microbatches_of(job)));
  }
  if (job.layout.dp_shard > 1) {
    list.emplace_back("Sharding", sharding_text(job));
  }
  for (const auto& line : summary.partition) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;  // the sum of all
    list.emplace_back(line.substr(0, colon), line.substr(colon + 2));
  }
  list.emplace_back(
      "Ranks",
      format("{} ({}, {})", world.size(), job.train.ranks, world.backend()));
  list.emplace_back("Device", world.device().str());
  list.emplace_back("Global batch", std::to_string(job.train.batch));
  list.emplace_back(
      "Optimizer", job.optimizer.name + ", learning rate " +
                       number_text(job.optimizer.learning_rate));
  list.emplace_back("Precision", precision_text(job));
  list.emplace_back("Seed", std::to_string(job.train.seed));
  if (!summary.resumed.empty()) {
    list.emplace_back("Resumed from", summary.resumed);
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

// Tokens of one microbatch, where samples are texts.
int64_t tokens_of(const Job& job, const ModelSource& source) {
  if (!is_text(source.sample)) return 0;
  const int64_t samples =
      job.train.batch / (job.layout.data_degree() * passes_per_step(job));
  return std::max<int64_t>(1, samples) * source.sample.input_shape[0];
}

Shard shard_of(
    const std::map<std::string, ParameterShard>& shards,
    const std::string& name, const torch::Tensor& tensor, int rank) {
  const auto found = shards.find(name);
  return found == shards.end() ? replicated(tensor.sizes().vec(), rank)
                               : found->second.shard;
}

}  // namespace

TensorShards describe_shards(const Job& job, const ModelSource& source) {
  const int ranks = static_cast<int>(job.layout.tp);
  TensorShards shards{.ranks = ranks};
  if (ranks == 1) return shards;
  shards.cuts_tokens = job.tensor.sequence_parallel && is_text(source.sample);
  shards.tokens = tokens_of(job, source);
  for (int rank = 0; rank < ranks; ++rank) {
    const LayerList layers = source.sharded(silent_tensor_parallel(job, rank));
    shards.layers.resize(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      shards.layers[i].name = layers[i].name;
      const BuiltLayer layer = build_on_meta(layers[i]);
      if (!layer.module) continue;
      const auto local = shards_of(*layer.module);
      auto& parameters = shards.layers[i].parameters;
      size_t at = 0;
      for (const auto& item : layer.module->named_parameters()) {
        if (rank == 0) {
          const std::string name = layers[i].name + "." + item.key();
          parameters.push_back(
              {.name = item.key(), .tied = source.first_names.count(name) > 0});
        }
        parameters[at++].parts.push_back(
            shard_of(local, item.key(), item.value(), rank));
      }
    }
  }
  return shards;
}

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
