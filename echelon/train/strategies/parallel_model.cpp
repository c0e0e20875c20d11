#include "echelon/train/strategies/parallel_model.h"

#include <algorithm>
#include <map>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/error.h"
#include "echelon/parallel/data/coalesced.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/train/strategies/rank_layers.h"

namespace echelon {
namespace {

BucketHook hook_of(const TrainOptions& options) {
  if (options.compress == Compression::bf16) return bf16_hook();
  if (options.compress == Compression::fp16) return fp16_hook();
  if (options.compress == Compression::powersgd) {
    return powersgd_hook({.rank = options.powersgd_rank, .seed = options.seed});
  }
  return all_reduce_hook();
}

std::vector<LocalParameter> parts_of(
    const torch::OrderedDict<std::string, torch::Tensor>& tensors,
    const std::map<std::string, ParameterShard>& shards) {
  std::vector<LocalParameter> parts;
  for (const auto& item : tensors) {
    if (!item.value().defined()) continue;
    LocalParameter part{
        .name = item.key(),
        .value = item.value(),
        .gradient = item.value().grad()};
    const auto shard = shards.find(item.key());
    if (shard != shards.end()) part.shard = shard->second;
    parts.push_back(std::move(part));
  }
  return parts;
}

// How many parameters train, in a line; none where all do.
std::vector<std::string> describe_trained(const ModelSource& source) {
  if (source.frozen.empty()) return {};
  int64_t trained = 0;
  for (const auto& info : source.parameters) {
    const bool trains = info.kind == ParameterInfo::Kind::parameter &&
                        !source.frozen.contains(info.name);
    if (trains) trained += info.num_elements();
  }
  const int64_t all = source.num_parameters();
  return {format(
      "{} of {} parameters train, {}", format_count(trained), format_count(all),
      format_percent(static_cast<double>(trained) / static_cast<double>(all)))};
}

}  // namespace

DistributedDataParallelOptions
data_parallel_options(const TrainOptions& train, bool sync_batch_norm) {
  DistributedDataParallelOptions options;
  options.bucket_bytes = train.bucket_bytes;
  options.find_unused_parameters = train.find_unused_parameters;
  options.sync_batch_norm = sync_batch_norm;
  options.hook = hook_of(train);
  // A stage, or what is not an expert's, may be frozen as a whole.
  options.may_be_frozen = true;
  return options;
}

std::vector<LocalParameter> local_parameters(const torch::nn::Module& module) {
  return parts_of(module.named_parameters(), shards_of(module));
}

std::vector<LocalParameter> local_buffers(const torch::nn::Module& module) {
  return parts_of(module.named_buffers(), shards_of(module));
}

std::vector<ParameterGroup>
trained_groups(const std::vector<LocalParameter>& parts, double weight_decay) {
  NamedTensors trained;
  for (const auto& part : parts) {
    if (part.value.requires_grad()) trained.emplace_back(part.name, part.value);
  }
  return parameter_groups(trained, weight_decay);
}

std::set<std::string> counted_elsewhere(
    const std::vector<LocalParameter>& parts, const MeshGroups& groups) {
  std::set<std::string> names;
  if (groups.along(Axis::ep).rank() == 0) return names;
  for (const auto& part : parts) {
    const bool sharded = part.range && groups.expert_shard().size() > 1;
    if (!sharded && !expert_of(part.name)) names.insert(part.name);
  }
  return names;
}

DistributedDataParallelOptions without_experts(
    DistributedDataParallelOptions options, const MeshGroups& groups) {
  if (groups.along(Axis::ep).size() > 1) {
    options.leaves_out = [](const std::string& parameter) {
      return expert_of(parameter).has_value();
    };
  }
  return options;
}

ExpertParallel::ExpertParallel(
    torch::nn::Module& network, const MeshGroups& groups,
    const DistributedDataParallelOptions& options) {
  const bool trains_experts =
      std::ranges::any_of(network.named_parameters(), [](const auto& item) {
        return item.value().requires_grad() && expert_of(item.key());
      });
  if (groups.along(Axis::ep).size() == 1 || !trains_experts) return;
  auto own = options;
  own.broadcast_buffers = false;
  own.sync_batch_norm = false;
  own.leaves_out = [](const std::string& parameter) {
    return !expert_of(parameter);
  };
  parallel_ = std::make_unique<DataParallelModule>(
      network, groups.same_experts(), std::move(own));
}

std::shared_ptr<void> ExpertParallel::begin_step() {
  return parallel_ ? parallel_->no_sync() : nullptr;
}

void ExpertParallel::begin_reduction() {
  if (parallel_) parallel_->begin_reduction();
}

void ExpertParallel::finish_reduction() {
  if (parallel_) parallel_->finish_reduction();
}

SumOverRanks sum_over(const std::vector<Group>& groups, torch::Device device) {
  return [groups, device](torch::Tensor& number) {
    auto sum = number.to(device);
    for (const auto& group : groups) {
      group.all_reduce(sum, ReduceOp::sum, {.label = "gradient norm"}).wait();
    }
    number.copy_(sum);
  };
}

std::optional<NonFinite> earliest(
    const std::optional<NonFinite>& found,
    const std::vector<std::string>& layers, const Group& group,
    torch::Device device) {
  if (group.size() == 1) return found;
  std::vector<std::string> lines;
  if (found) lines = {found->layer, found->what};
  const auto all = gather_lines(lines, group, device, "first NaN");
  // A broken parameter of one rank breaks the outputs of all: it comes first.
  const auto position = [&](const NonFinite& one) {
    return std::pair(
        one.layer == "input"
            ? layers.begin()
            : std::find(layers.begin(), layers.end(), one.layer),
        one.what == "output");
  };
  std::optional<NonFinite> first;
  for (const auto& one : all) {
    if (one.empty()) continue;
    const NonFinite here{one[0], one[1]};
    if (!first || position(here) < position(*first)) first = here;
  }
  return first;
}

std::vector<std::string> describe_share(
    const ModelPlace& place, const std::vector<LocalParameter>& parts) {
  std::vector<std::string> ranks;
  const auto add = [&](const char* name, const Group& group) {
    if (group.size() == 1) return;
    ranks.push_back(
        format("{} rank {} of {}", name, group.rank(), group.size()));
  };
  const bool sharded = std::ranges::any_of(
      parts, [](const auto& part) { return part.range.has_value(); });
  if (sharded) add("sharded", place.groups.shard());
  add("tensor-parallel", place.groups.along(Axis::tp));
  add("expert-parallel", place.groups.along(Axis::ep));
  if (ranks.empty()) return {};
  const int64_t all = place.source.num_parameters();
  int64_t own = 0;
  for (const auto& part : parts) own += part.value.numel();
  return {format(
      "{}: {} of {} parameters, {}", join(ranks, ", "), format_count(own),
      format_count(all),
      format_percent(static_cast<double>(own) / static_cast<double>(all)))};
}

void announce(const ModelPlace& place, const std::vector<std::string>& lines) {
  if (!place.announce) return;
  for (const auto& line : lines) place.announce(line);
}

Score MicrobatchLoop::run(const Batch& batch, const LossFactor& scale) const {
  Score score;
  int64_t left = num_microbatches;
  for (const Batch& part : split_batch(batch, num_microbatches)) {
    const bool last = --left == 0;
    const auto guard = around ? around(last) : nullptr;
    torch::Tensor loss;
    {
      timeline::ScopedSpan span(
          recorder, "compute", "forward", timeline::SpanKind::forward);
      const auto outputs = forward(inputs_of(part));
      const Tensors targets = targets_of(part);
      const auto sum = objective.loss_sum(outputs, targets);
      objective.add_loss(score, sum, targets);
      loss = scale * sum;
      profiling::keep_as_activations();
    }
    if (before_backward) before_backward(last);
    timeline::ScopedSpan span(
        recorder, "compute", "backward", timeline::SpanKind::backward);
    loss.backward();
  }
  return score;
}

torch::Tensor counted_once(const models::RouterSteps& routers, bool here) {
  const auto& counts = routers.counts();
  return here || !counts.defined() ? counts : torch::zeros_like(counts);
}

Tensors stand_in(const Tensors& inputs) {
  Tensors one;
  for (const auto& input : inputs) {
    auto shape = input.sizes().vec();
    shape[0] = 1;
    one.push_back(torch::zeros(shape, input.options()));
  }
  return one;
}

TrainingObjective objective_on(
    const Job& job, const ModelPlace& place, const TensorParallel& parallel) {
  const ModelSource& source = place.source;
  TrainingObjective objective(
      source.objective(parallel), is_text(source.sample), parallel,
      place.groups.data(), source.metrics, source.sharded_scores);
  if (job.layout.cp > 1 && !is_text(source.sample)) {
    throw ConfigError(format(
        "[layout] cp={}: ranks of cp have parts of each text, and the samples "
        "are no texts: whole numbers, in one dimension, with as many targets; "
        "set cp = 1",
        job.layout.cp));
  }
  if (!objective.needs_whole_batch()) return objective;
  if (passes_per_step(job) > 1) {
    throw ConfigError(format(
        "{} = {}: the objective compares the samples of the whole batch with "
        "each other, so a step is one pass; set it to 1",
        job.layout.pp > 1 ? "[layout] microbatches" : "[train] accumulate",
        passes_per_step(job)));
  }
  if (job.layout.cp > 1) {
    throw ConfigError(format(
        "[layout] cp={}: the objective compares samples with each other, and "
        "ranks of cp have parts of the same ones; set cp = 1",
        job.layout.cp));
  }
  return objective;
}

void score_batch(
    const TrainingObjective& objective, Score& score, const Tensors& outputs,
    const Batch& batch, bool empty) {
  if (!empty) {
    objective.evaluate(score, outputs, targets_of(batch));
  } else if (objective.needs_whole_batch()) {
    objective.evaluate_none(score, outputs, targets_of(batch));
  }
}

std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place) {
  announce(place, describe_trained(place.source));
  if (job.layout.pp > 1) return make_pipeline_model(job, place);
  if (!job.model.devices.empty()) return make_placed_model(job, place);
  if (shards_parameters(job)) return make_sharded_model(job, place);
  return make_data_parallel_model(job, place);
}

}  // namespace echelon
