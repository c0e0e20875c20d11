// Flags stay texts up to here, since an empty one means not given and must
// leave what the configuration or the default says. With CONFIG the strategy is
// the configuration's, and flags change it; otherwise model, cluster and batch
// must be given. nearest_fit() estimates every combination of a few changes
// that save memory, by formulas, and takes the one with the fewest changes,
// then the one with the fastest step.
#include "echelon/cli/simulate.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "echelon/cli/count.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cost/choices.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/model_shape.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/predict/configured.h"
#include "echelon/text/format.h"

namespace echelon::cli {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;

void number(
    const char* flag, const std::string& text, int64_t lowest, int64_t highest,
    int64_t& value) {
  if (!text.empty()) value = parse_count(flag, text, lowest, highest);
}

void real(
    const char* flag, const std::string& text, double lowest, double& value) {
  if (text.empty()) return;
  char* end = nullptr;
  value = std::strtod(text.c_str(), &end);
  if (*end == '\0' && std::isfinite(value) && value >= lowest) return;
  throw ConfigError(
      format("{} {}: must be a number, at least {}", flag, text, lowest));
}

void require(const char* flag, const std::string& text, const char* example) {
  if (!text.empty()) return;
  throw ConfigError(
      format("echelon simulate: {} is missing, as in {}", flag, example));
}

cost::Recompute recompute_from(const std::string& text) {
  std::vector<std::string> names;
  for (const cost::Recompute one : cost::kRecomputes)
    names.push_back(cost::to_string(one));
  check_choice("--recompute", text, names);
  return cost::kRecomputes[static_cast<size_t>(
      std::ranges::find(names, text) - names.begin())];
}

void read_strategy(
    const SimulateArguments& arguments, cost::Strategy& strategy) {
  if (!arguments.layout.empty()) {
    strategy.layout = parse_layout(arguments.layout);
  }
  number("--batch", arguments.batch, 1, kMost, strategy.global_batch);
  number(
      "--microbatch", arguments.microbatch, 1, kMost, strategy.microbatch_size);
  number("--seq-len", arguments.seq_len, 1, kMost, strategy.seq_len);
  number(
      "--stages-per-rank", arguments.stages_per_rank, 1, 1 << 20,
      strategy.stages_per_rank);
  if (strategy.layout.dp_shard > 1 && strategy.zero_stage == 0) {
    strategy.zero_stage = 3;  // the default of [shard] stage
  }
  number("--zero", arguments.zero, 1, 3, strategy.zero_stage);
  if (!arguments.zero.empty() && strategy.layout.dp_shard == 1) {
    throw ConfigError(
        "--zero " + arguments.zero +
        ": says what fsdp shards, but the layout has no fsdp; add fsdp=… to "
        "--layout");
  }
  if (!arguments.schedule.empty()) {
    strategy.schedule = schedule_kind(arguments.schedule);
  }
  if (!arguments.recompute.empty()) {
    strategy.recompute = recompute_from(arguments.recompute);
  }
  if (!arguments.precision.empty()) {
    strategy.precision = cluster::precision_from_name(arguments.precision);
  }
  if (!arguments.stack.empty()) {
    strategy.framework = cost::find_framework(arguments.stack).name;
  }
  if (arguments.sequence_parallel) strategy.sequence_parallel = true;
}

void read_options(const SimulateArguments& arguments, SimulateCase& made) {
  simulator::SimulationOptions& options = made.options;
  made.memory_is_planned = arguments.memory_is_planned;
  number("--steps", arguments.steps, 1, 1'000'000, options.steps);
  real("--jitter", arguments.jitter, 0, options.jitter);
  number(
      "--stragglers", arguments.stragglers, 0, made.strategy.layout.num_ranks(),
      options.stragglers);
  if (options.stragglers > 0) options.straggler_factor = 1.2;
  real(
      "--straggler-factor", arguments.straggler_factor, 0,
      options.straggler_factor);
  int64_t seed = 0;
  number("--seed", arguments.seed, 0, kMost, seed);
  options.seed = static_cast<uint64_t>(seed);
  if (arguments.run.empty()) options.timeline_ranks = 0;
  simulator::FailureOptions& failures = made.failures;
  failures.seed = options.seed;
  made.with_failures = !arguments.hours.empty();
  real("--hours", arguments.hours, 0, failures.hours);
  const struct {
    const char* flag;
    const std::string& text;
    double& value;
  } of_failures[] = {
      {"--mean-hours-between-failures", arguments.mean_hours_between_failures,
       made.cluster.mean_hours_between_failures},
      {"--checkpoint-seconds", arguments.checkpoint_seconds,
       failures.checkpoint_seconds},
      {"--checkpoint-interval-seconds", arguments.checkpoint_interval_seconds,
       failures.checkpoint_interval_seconds},
      {"--recovery-seconds", arguments.recovery_seconds,
       failures.recovery_seconds}};
  for (const auto& [flag, text, value] : of_failures) {
    real(flag, text, 0, value);
  }
  for (const auto& [flag, text, value] : of_failures) {
    if (made.with_failures || text.empty()) continue;
    throw ConfigError(format(
        "{} {}: is for runs with failures; add --hours, as in --hours 168",
        flag, text));
  }
}

// Sets `count` where formulas do not know the layers.
void read_configuration(SimulateArguments& arguments, SimulateCase& made) {
  if (!arguments.model.empty()) {
    throw ConfigError(format(
        "--model {} with {}: the configuration says it; leave one out",
        arguments.model, arguments.config));
  }
  const cluster::Device& device = made.cluster.node_of(0).device;
  const Job job = with_compute_dtype(
      load_job(arguments.config, {.layout = arguments.layout}), device);
  const JobFacts facts = check_job(job, job.layout.num_ranks());
  made.strategy = predict::configured_strategy(job);
  if (is_counted_alone(job)) arguments.count = arguments.layers.empty();
  if (!arguments.layers.empty()) {
    made.model = cost::read_counted_model(arguments.layers);
  } else if (arguments.count) {
    Job counted = job;
    if (!is_counted_alone(job)) {
      made.formulas = predict::configured(job, facts).model;
      made.strategy.product_chunks =
          cost::choose_product_chunks(
              *made.formulas, made.strategy, made.cluster)
              .chunks;
      counted.tensor.overlap_chunks = made.strategy.product_chunks;
    }
    made.model = count_layers(counted, device.processor);
  } else {
    made.model = predict::configured(job, facts).model;
  }
}

// Counted layers are those of one of the ranks that compute them together.
void refuse_other_ranks(
    const SimulateArguments& arguments, const SimulateCase& made) {
  if (!arguments.count && arguments.layers.empty()) return;
  const Layout& layout = made.strategy.layout;
  for (const Axis axis : {Axis::cp, Axis::ep}) {
    if (layout.degree(axis) == 1) continue;
    throw ConfigError(format(
        "{}={}: layers are not counted for it; set it to 1, or leave --count "
        "and "
        "--layers out",
        to_string(axis), layout.degree(axis)));
  }
  if (made.model.layer_ranks == layout.tp) return;
  throw ConfigError(format(
      "tp={}: the layers of {} were counted for tp={}; count them again with "
      "this layout",
      layout.tp, arguments.layers, made.model.layer_ranks));
}

void refuse_layers(const SimulateArguments& arguments) {
  const std::string given = arguments.count ? "--count"
                            : arguments.layers.empty()
                                ? ""
                                : "--layers " + arguments.layers;
  if (given.empty()) return;
  throw ConfigError(format(
      "{}: is for the layers of a configuration; name it, as in echelon "
      "simulate first.toml --cluster h100-sxm:1x8 {}",
      given, given));
}

// One thing about a strategy, as it is or changed.
struct Change {
  std::string flag;  // empty: as it is
  std::function<void(cost::Strategy&)> apply = [](cost::Strategy&) {};
};

// Each row is one thing; the first of it leaves it as it is.
std::vector<std::vector<Change>> changes_of(const cost::Strategy& strategy) {
  std::vector<Change> microbatch = {{}}, sharding = {{}}, recompute = {{}},
                      sequence = {{}};
  for (int64_t size = strategy.microbatch_size / 2;
       size >= 1 && strategy.rank_microbatch.empty(); size /= 2) {
    microbatch.push_back(
        {format("--microbatch {}", size),
         [=](cost::Strategy& other) { other.microbatch_size = size; }});
  }
  for (int64_t stage = strategy.zero_stage + 1;
       stage <= 3 && strategy.layout.dp_shard > 1; ++stage) {
    sharding.push_back({format("--zero {}", stage), [=](cost::Strategy& other) {
                          other.zero_stage = stage;
                        }});
  }
  if (strategy.layout.dp_replicate > 1) {
    Layout sharded = strategy.layout;
    // Replicas become shards: devices and samples of each rank stay the same.
    sharded.dp_shard *= std::exchange(sharded.dp_replicate, 1);
    sharding.push_back(
        {"--layout " + to_string(sharded), [=](cost::Strategy& other) {
           other.layout = sharded;
           other.zero_stage = 3;
         }});
  }
  for (const auto kind : {cost::Recompute::selective, cost::Recompute::all}) {
    if (kind <= strategy.recompute) continue;
    recompute.push_back(
        {"--recompute " + std::string(cost::to_string(kind)),
         [=](cost::Strategy& other) {
           other.recompute = kind;
           other.recompute_layers = -1;
         }});
  }
  if (strategy.layout.tp > 1 && !strategy.sequence_parallel) {
    sequence.push_back({"--sequence-parallel", [](cost::Strategy& other) {
                          other.sequence_parallel = true;
                        }});
  }
  return {sharding, microbatch, recompute, sequence};
}

}  // namespace

std::optional<NearestFit> nearest_fit(const SimulateCase& what) {
  std::vector<std::pair<std::vector<std::string>, cost::Strategy>> all = {
      {{}, what.strategy}};
  for (const auto& choices : changes_of(what.strategy)) {
    const auto before = std::exchange(all, {});
    for (const auto& [flags, strategy] : before) {
      for (const Change& change : choices) {
        auto& [more, changed] = all.emplace_back(flags, strategy);
        if (!change.flag.empty()) more.push_back(change.flag);
        change.apply(changed);
      }
    }
  }
  std::optional<NearestFit> nearest;
  size_t fewest = 0;
  for (const auto& [flags, strategy] : all) {
    if (nearest && flags.size() > fewest) continue;
    try {
      auto step = cost::estimate_step(what.model, strategy, what.cluster);
      const bool better = !nearest || flags.size() < fewest ||
                          step.step_seconds < nearest->step.step_seconds;
      if (!step.fits || !better) continue;
      fewest = flags.size();
      nearest = NearestFit{join(flags, " "), std::move(step)};
    } catch (const ConfigError&) {  // settings that contradict each other
    }
  }
  return nearest;
}

SimulateCase read_case(const SimulateArguments& arguments) {
  SimulateCase made;
  SimulateArguments flags = arguments;
  if (arguments.count && !arguments.layers.empty()) {
    throw ConfigError(
        "--count with --layers " + arguments.layers +
        ": both say what the layers are; leave one out");
  }
  if (arguments.config.empty()) {
    refuse_layers(arguments);
    require("--model", arguments.model, "--model llama3.1-70b");
    require("--cluster", arguments.cluster, "--cluster h100-sxm:64x8");
    require("--batch", arguments.batch, "--batch 1024 (samples of a step)");
    made.model = cost::find_model(arguments.model);
    made.cluster = cluster::find_cluster(arguments.cluster);
  } else {
    require("--cluster", arguments.cluster, "--cluster h100-sxm:1x8");
    made.cluster = cluster::find_cluster(arguments.cluster);
    read_configuration(flags, made);
    flags.layout.clear();  // load_job has read it
  }
  made.model.expert_load = parse_expert_load(flags.expert_load, made.model);
  read_strategy(flags, made.strategy);
  refuse_other_ranks(flags, made);
  made.strategy = cost::with_choices(made.model, made.strategy, made.cluster);
  read_options(flags, made);
  return made;
}

}  // namespace echelon::cli
