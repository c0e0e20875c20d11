// At the end of a run each rank gives its spans to rank 0 through the store, as
// MessagePack, and rank 0 alone writes. A prediction and findings are additions
// that must never end a run: whatever fails in them is left out, or becomes a
// sentence that says why it is missing. Findings are read from the run's files
// as `echelon explain` reads them, so timeline.json is written before.
#include "echelon/train/report_writer.h"

#include <torch/types.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "echelon/cluster/host.h"
#include "echelon/cost/model_shape.h"
#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/explain/explain.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/job/run_folder.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"
#include "echelon/report/report.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/recorder.h"
#include "echelon/timeline/timeline.h"
#include "echelon/train/strategies/count_job.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

constexpr size_t kDivisionsShown = 5;  // the last ones

// Every rank calls this. Rank 0 gets the spans of all ranks, by rank, through
// the job's store, so that the hosts of a job need no shared folder.
std::vector<timeline::RankSpans>
gather_spans(World& world, timeline::RankSpans own) {
  const auto gathered = world.gather(timeline::to_bytes(own));
  if (world.rank() != 0) return {};
  std::vector<timeline::RankSpans> all = {std::move(own)};
  for (int rank = 1; rank < world.size(); ++rank) {
    all.push_back(
        timeline::rank_spans_of(rank, gathered[static_cast<size_t>(rank)]));
  }
  return all;
}

std::string rank_name(const World& world) {
  return format("rank {} ({})", world.rank(), world.device().str());
}

/// Rank 0's clock minus ours, for hosts with different clocks: half a round
/// trip over the store is accurate enough for a drawing.
int64_t clock_offset(World& world) {
  // The ranks leave the barrier at nearly the same time, and read their clocks
  // then.
  world.group().barrier({.label = "clock"});
  const auto clocks = world.exchange(std::to_string(timeline::steady_now_ns()));
  if (world.local_size() == world.size()) return 0;
  return std::stoll(clocks[0]) -
         std::stoll(clocks[static_cast<size_t>(world.rank())]);
}

// "float32", "float32, products in TF32", "bf16, master parameters float32,
// sums over ranks float32"
std::string precision_text(const Job& job) {
  const auto& precision = job.precision;
  const std::string dtype = to_string(job.model.dtype);
  const bool fp8 = precision.compute == ComputeDtype::fp8;
  std::string text =
      in_16_bits(precision.compute)
          ? format(
                "{}, master parameters {}",
                to_string(fp8 ? ComputeDtype::bf16 : precision.compute), dtype)
          : dtype;
  if (fp8) text += ", products of linear layers in fp8";
  if (precision.compute == ComputeDtype::tf32) text += ", products in TF32";
  if (precision.reduce != ReduceDtype::same) {
    text += ", sums over ranks " + to_string(precision.reduce);
  }
  return text;
}

// "stage 3: parameters, gradients and optimizer state over 4 ranks"
std::string sharding_text(const Job& job) {
  const char* what[] = {
      "optimizer state", "gradients and optimizer state",
      "parameters, gradients and optimizer state"};
  return format(
      "stage {}: {} over {}", job.shard.stage, what[job.shard.stage - 1],
      counted(job.layout.dp_shard, "rank"));
}

// "3, training waited 40 ms for them, 0.1 % of its time"; of a resumed run
// "3 since then, …": stands below the row that says from which step.
std::string checkpoints_text(const RunSummary& summary) {
  std::string text = format(
      "{}{}", format_count(summary.checkpoints),
      summary.resumed.empty() ? "" : " since then");
  // A checkpoint after the last step costs training nothing.
  if (summary.checkpoint_seconds <= 0 || summary.seconds <= 0) return text;
  return text +
         format(
             ", training waited {} for them, {} of its time",
             format_seconds(summary.checkpoint_seconds),
             format_percent(summary.checkpoint_seconds / summary.seconds));
}

// The arguments of a process; empty when they cannot be read.
std::vector<std::string> arguments_of(const std::string& process) {
  std::ifstream file("/proc/" + process + "/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string one; std::getline(file, one, '\0');) {
    arguments.push_back(std::move(one));
  }
  return arguments;
}

// The argument as a shell takes it.
std::string quoted(const std::string& argument) {
  const bool plain =
      !argument.empty() && std::ranges::all_of(argument, [](unsigned char c) {
        return std::isalnum(c) || std::strchr("-_./=,:+@%", c) != nullptr;
      });
  if (plain) return argument;
  std::string text = "'";
  for (const char c : argument) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// A process's parent; empty when there is none.
std::string parent_of(const std::string& process) {
  std::ifstream file("/proc/" + process + "/status");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, parent;
    if (words >> name >> parent && name == "PPid:" && parent != "0") {
      return parent;
    }
  }
  return "";
}

// What the user typed: the launcher's command where one started this process.
// Between the two are a guard and, in some jobs, a fork server.
std::string command_of_run() {
  std::vector<std::string> arguments;
  if (std::getenv("LOCAL_RANK") != nullptr) {
    std::string process = std::to_string(::getppid());
    for (int i = 0; i < 3 && !process.empty(); ++i) {
      arguments = arguments_of(process);
      const std::filesystem::path program =
          arguments.empty() ? "" : arguments.front();
      if (program.filename() == "echelon") break;
      arguments.clear();
      process = parent_of(process);
    }
  }
  if (arguments.empty()) arguments = arguments_of("self");
  return join(arguments, " ", quoted);
}

// "2026-11-24 09:30:00 UTC", in the time zone of this host.
std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[64];
  const size_t size =
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %Z", &local);
  return {text, size};
}

// "node-1, AMD EPYC 9654, 2 cores", with the other hosts' number.
std::string host_text(const World& world) {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string text = name.data();
  const auto processor = cluster::find_host_processor().name;
  if (!processor.empty()) text += ", " + processor;
  const int cores = cluster::available_cores();
  text += ", " + counted(cores, "core");
  const int others = world.size() / std::max(1, world.local_size()) - 1;
  if (others > 0) {
    text += "; and " + counted(others, "other host");
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> facts(
    const Job& job, const ModelSource& source, const World& world,
    const RunSummary& summary) {
  std::vector<std::pair<std::string, std::string>> list;
  list.emplace_back("Model", source.name);
  list.emplace_back("Parameters", format_count(source.num_parameters()));
  list.emplace_back("Data", to_string(job.data.name));
  list.emplace_back("Layout", to_string(job.layout));
  if (job.layout.pp > 1) {
    const std::string name = job.pipeline.schedule_file.empty()
                                 ? to_string(job.pipeline.schedule)
                                 : job.pipeline.schedule_file;
    list.emplace_back(
        "Pipeline",
        format("{}, {}", name, counted(microbatches_of(job), "microbatch")));
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
      "Ranks", format(
                   "{} ({}, {})", format_count(world.size()),
                   to_string(job.train.ranks), world.backend()));
  list.emplace_back("Device", world.device().str());
  list.emplace_back("Global batch", format_count(job.train.batch));
  list.emplace_back(
      "Optimizer", format(
                       "{}, learning rate {:g}", to_string(job.optimizer.name),
                       job.optimizer.learning_rate));
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
        format_count(summary.skipped_steps) + ", gradients were not finite");
  }
  for (const auto& rollback : summary.rollbacks) {
    list.emplace_back("Rolled back", timeline::to_text(rollback));
  }
  const size_t divided = summary.rebalances.size();
  for (size_t i = divided - std::min(divided, kDivisionsShown); i < divided;
       ++i) {
    const auto& one = summary.rebalances[i];
    list.emplace_back(
        one.of == timeline::Divided::layers ? "Stages cut anew"
                                            : "Batch divided anew",
        timeline::to_text(one));
  }
  if (summary.skipped > 0) {
    list.emplace_back("Samples skipped", format_count(summary.skipped));
  }
  list.emplace_back("Ended", time_now());
  list.emplace_back("Host", host_text(world));
  list.emplace_back(
      "Versions",
      format("Echelon {}, LibTorch {}", build_info::kVersion, TORCH_VERSION));
  list.emplace_back("Command", command_of_run());
  return list;
}

// Tokens of one microbatch, where samples are texts.
int64_t tokens_of(const Job& job, const ModelSource& source) {
  if (!is_text(source.sample)) return 0;
  const int64_t samples =
      job.train.batch / (job.layout.data_ranks() * passes_per_step(job));
  return std::max<int64_t>(1, samples) * source.sample.input_shape[0];
}

Shard shard_of(
    const std::map<std::string, ParameterShard>& shards,
    const std::string& name, const torch::Tensor& tensor, int rank) {
  const auto found = shards.find(name);
  return found == shards.end() ? replicated(tensor.sizes().vec(), rank)
                               : found->second.shard;
}

JobFacts facts_of(const ModelSource& source) {
  JobFacts facts;
  facts.data.sample_shape = source.sample.input_shape;
  facts.classes = source.classes;
  facts.num_parameters = source.num_parameters();
  return facts;
}

predict::Configured configured_run(
    const Job& job, const ModelSource& source, const RunLayers& layers) {
  if (layers.counted) {
    return predict::configured_as_counted(*layers.counted, job, job);
  }
  return predict::configured(job, facts_of(source));
}

// One rank alone calls it. Where nothing can be predicted it does not throw:
// the result says why.
report::StepPrediction predict_run_here(
    const Job& job, const ModelSource& source, const World& world,
    const RunLayers& layers) {
  // The simulator knows the links within a host, but not those between hosts.
  if (world.local_size() != world.size()) {
    return {
        .missing =
            "The links between the hosts of this run are not known, so that "
            "nothing is predicted. `echelon explain RUN --cluster FILE` takes "
            "a file that says them."};
  }
  const predict::RunCluster here =
      predict::cluster_of_run(world.size(), world.device().is_cpu());
  if (!here.cluster) return {.missing = here.missing};
  if (!layers.missing.empty()) return {.missing = layers.missing};
  try {
    return predict::predict_step(
        configured_run(job, source, layers), *here.cluster);
  } catch (const std::exception& error) {  // it must not end the report
    return {.missing = std::string("Nothing is predicted: ") + error.what()};
  }
}

RunLayers layers_of_run(
    const Job& job, const ModelSource& source, const World& world,
    bool own_layers) {
  RunLayers layers;
  if (!job.model.devices.empty()) {
    layers.missing =
        "Nothing is predicted: [model] devices: a rank with several devices is "
        "not simulated";
    return layers;
  }
  if (!predict::counts_layers(job.layout, world.device().is_cpu(), own_layers))
    return layers;
  if (job.layout.tp > 1 || job.layout.cp > 1) {
    layers.missing =
        "Nothing is predicted: a program's own layers are counted, and what "
        "ranks of tp and cp send inside of them is not";
    return layers;
  }
  try {
    layers.counted = counted_shape(job, source);
  } catch (const std::exception& error) {  // it must not end the run
    layers.missing = std::string("Nothing is predicted: ") + error.what();
  }
  return layers;
}

void save_layers(const RunLayers& layers, const std::filesystem::path& folder) {
  const auto path = folder / predict::kCountedLayersFile;
  try {
    if (layers.counted) {
      write_file_atomically(path, cost::counted_model_json(*layers.counted));
    } else {
      std::filesystem::remove(path);
    }
  } catch (const std::exception& error) {
    std::fprintf(
        stderr,
        "warning: %s; `echelon explain` will take formulas for the layers\n",
        error.what());
  }
}

// As `echelon explain` finds them in the run's files. Fixes that take long to
// simulate are left to that command.
std::optional<report::ReportFindings>
findings_of(const std::filesystem::path& folder) {
  try {
    return explain::findings_for_page(
        explain::explain_run(folder, {.simulation_seconds = 1}));
  } catch (const std::exception&) {  // it must not end the report
    return {};
  }
}

}  // namespace

void write_own_configuration(
    const Job& job, const std::filesystem::path& folder, bool own_layers) {
  const auto path = folder / "config.toml";
  std::error_code error;
  if (std::filesystem::equivalent(path, job.document.name(), error)) return;
  if (std::filesystem::exists(path, error) && !own_layers) return;
  write_configuration(job, folder);
}

RunWork work_of_run(
    const Job& job, const ModelSource& source, const World& world,
    const RunLayers& layers) {
  RunWork work;
  if (!layers.missing.empty()) return work;
  try {
    const predict::Configured what = configured_run(job, source, layers);
    const cost::Strategy& strategy = what.strategy;
    const int64_t length = strategy.seq_len_or(what.model.seq_len);
    work.step_flops = static_cast<double>(strategy.global_batch) *
                      what.model.model_flops(length, false);
    const predict::RunCluster here =
        predict::cluster_of_run(world.local_size(), world.device().is_cpu());
    if (!here.cluster) return work;
    const cluster::Device& device = here.cluster->node_of(0).device;
    double peak = device.peak(strategy.precision);
    if (peak == 0) peak = device.peak(cluster::Precision::fp32);
    work.peak_flops = peak * world.size();
  } catch (const std::exception&) {  // it must not end the run
  }
  return work;
}

RunLayers count_run_layers(
    const Job& job, const ModelSource& source, const World& world,
    bool own_layers, const std::filesystem::path& folder) {
  RunLayers layers = layers_of_run(job, source, world, own_layers);
  save_layers(layers, folder);
  return layers;
}

report::TensorShards
describe_shards(const Job& job, const ModelSource& source) {
  const int ranks = static_cast<int>(job.layout.tp);
  report::TensorShards shards{.ranks = ranks};
  if (ranks == 1) return shards;
  shards.shards_tokens = job.tensor.sequence_parallel && is_text(source.sample);
  shards.tokens = tokens_of(job, source);
  for (int rank = 0; rank < ranks; ++rank) {
    const LayerList layers = source.sharded(silent_tensor_parallel(job, rank));
    shards.layers.resize(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
      shards.layers[i].name = layers[i].name;
      const BuiltLayer layer = counting::build_on_meta(layers[i]);
      if (!layer.module) continue;
      const auto local = shards_of(*layer.module);
      auto& parameters = shards.layers[i].parameters;
      // Every rank has the same parameters in the same order.
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
    const Job& job, const ModelSource& source, World& world,
    const std::filesystem::path& folder, std::vector<timeline::Span> spans,
    const RunSummary& summary) {
  auto ranks = gather_spans(
      world, {.rank = world.rank(),
              .rank_name = rank_name(world),
              .clock_offset_ns = clock_offset(world),
              .spans = std::move(spans),
              .memory = summary.memory});
  if (world.rank() != 0) return;
  report::ReportInput input;
  input.title = source.name + " on " + to_string(job.data.name);
  input.facts = facts(job, source, world, summary);
  input.metrics = summary.steps;
  input.evaluations = summary.evaluations;
  input.timeline = timeline::merge_spans(std::move(ranks), input.title);
  input.tensor = describe_shards(job, source);
  input.outcome = summary.outcome;
  input.prediction = predict_run_here(job, source, world, summary.layers);
  timeline::write_chrome_trace(folder / "timeline.json", input.timeline);
  input.findings = findings_of(folder);
  report::write_report(folder / "report.html", input);
}

}  // namespace echelon
