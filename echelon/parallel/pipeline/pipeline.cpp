// Every call begins with one small all-gather, in which each rank tells what it
// is about to do and by which schedule, and the rank of stage 0 tells the
// shapes of the microbatches. So ranks that do different things find out at
// once. Shapes that occurred before are not sent again: each rank has recorded
// what they lead to.
#include "echelon/parallel/pipeline/pipeline.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <map>
#include <unordered_set>

#include "echelon/error.h"
#include "echelon/parallel/pipeline/pipeline_run.h"
#include "echelon/parallel/pipeline/tied_parameters.h"
#include "echelon/parallel/pipeline/tuple_shape.h"
#include "echelon/schedule/check.h"
#include "echelon/text/format.h"

namespace echelon {

using pipeline::Fingerprint;
using pipeline::RecordedShapes;
using pipeline::TransferPlan;

// --------------------------------------------------------------------- stages

std::vector<std::pair<std::string, torch::Tensor>>
PipelineStage::named_parameters() const {
  std::vector<std::pair<std::string, torch::Tensor>> all;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& layer : layers) {
    if (!layer.module) continue;
    for (const auto& item : layer.module->named_parameters()) {
      if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
      all.emplace_back(layer.name + "." + item.key(), item.value());
    }
  }
  return all;
}

PipelineStage stage_of(const Network& network, int32_t stage) {
  return {.stage = stage, .layers = network.layers()};
}

PipelineStage build_stage(
    const LayerList& list, int32_t stage, size_t begin, size_t end,
    std::optional<uint64_t> seed) {
  if (seed) return stage_of(*build_network(list, begin, end, *seed), stage);
  PipelineStage built{.stage = stage};
  for (size_t i = begin; i < end; ++i) {
    auto [module, forward] = list[i].build();
    built.layers.push_back(
        {list[i].name, std::move(module), std::move(forward)});
  }
  return built;
}

std::vector<size_t>
partition_evenly(const LayerList& list, int32_t num_stages) {
  const auto stages = static_cast<size_t>(num_stages);
  if (num_stages < 1 || list.size() < stages) {
    throw ConfigError(format(
        "{} pipeline stages for a model of {} layers; every stage needs one: "
        "use at most {} stages",
        num_stages, list.size(), list.size()));
  }
  std::vector<size_t> bounds;
  for (size_t i = 0; i <= stages; ++i) {
    bounds.push_back(list.size() * i / stages);
  }
  return bounds;
}

std::vector<PipelineStage> build_stages(
    const LayerList& list, const std::vector<size_t>& bounds,
    const std::vector<int32_t>& rank_of_stage, int32_t rank,
    std::optional<uint64_t> seed) {
  std::vector<PipelineStage> stages;
  for (size_t stage = 0; stage < rank_of_stage.size(); ++stage) {
    if (rank_of_stage[stage] != rank) continue;
    stages.push_back(build_stage(
        list, static_cast<int32_t>(stage), bounds.at(stage),
        bounds.at(stage + 1), seed));
  }
  return stages;
}

// ------------------------------------------------------------------- pipeline

namespace {

// The number of different batches whose shapes are recorded.
constexpr size_t kRecorded = 64;
constexpr int64_t kNameLength = 96;

// What each rank tells at the beginning of a call.
enum Word : size_t { kCall, kSchedule, kMicrobatches, kShapes, kFlags, kWords };
using Words = std::array<int64_t, kWords>;
constexpr std::array<const char*, 2> kCalls = {"step", "evaluate"};

std::vector<StageParameter>
parameters_of(const std::vector<PipelineStage>& stages) {
  std::vector<StageParameter> parameters;
  for (const auto& stage : stages) {
    for (const auto& [name, tensor] : stage.named_parameters()) {
      parameters.push_back({name, stage.stage, tensor});
    }
  }
  return parameters;
}

int64_t fingerprint(const Schedule& schedule) {
  Fingerprint print;
  for (int32_t rank : schedule.rank_of_stage) print.add(rank);
  for (const auto& actions : schedule.ranks) {
    print.add(-1);
    for (const auto& action : actions) {
      print.add(static_cast<int64_t>(action.kind));
      print.add(action.stage);
      print.add(action.microbatch);
    }
  }
  return print.value();
}

}  // namespace

struct Pipeline::Impl {
  Impl(
      Group group_, Schedule schedule_, std::vector<PipelineStage> stages_,
      PipelineOptions options_)
      : group(std::move(group_)),
        schedule(std::move(schedule_)),
        stages(std::move(stages_)),
        options(std::move(options_)),
        tied(group, options.ties, parameters_of(stages), options.device) {
    check_ranks();
    check(schedule);
    context.num_stages = schedule.num_stages();
    context.local.assign(static_cast<size_t>(schedule.num_stages()), -1);
    for (size_t i = 0; i < stages.size(); ++i) {
      context.local[static_cast<size_t>(stages[i].stage)] =
          static_cast<int32_t>(i);
    }
    exchange_names();
    use_schedule();
    connect_peers();
    if (options.copy_tied_values) {
      tied.copy_first();
    } else {
      tied.check_equal();
    }
  }

  // Checks that the stages are those that the schedule assigns to this rank.
  void check_ranks() const {
    if (schedule.num_ranks() != group.size()) {
      throw ConfigError(format(
          "schedule \"{}\" is for {} ranks, but axis {} has {}", schedule.name,
          schedule.num_ranks(), group.axis(), group.size()));
    }
    std::vector<int32_t> given;
    for (const auto& stage : stages) {
      given.push_back(stage.stage);
      if (stage.layers.empty()) {
        throw ConfigError(format(
            "stage {} of the pipeline has no layers; every stage needs one",
            stage.stage));
      }
    }
    if (given != schedule.stages_of(group.rank())) {
      throw ConfigError(format(
          "schedule \"{}\" puts stages {} on rank {}, which was given stages "
          "{}",
          schedule.name, list(schedule.stages_of(group.rank())), group.rank(),
          list(given)));
    }
  }

  static std::string list(const std::vector<int32_t>& numbers) {
    return numbers.empty() ? "(none)" : join(numbers, ", ");
  }

  torch::TensorOptions like(torch::Dtype dtype) const {
    return torch::TensorOptions().dtype(dtype).device(options.device);
  }

  // Every rank learns the name of each stage's last layer, for errors.
  void exchange_names() {
    const int64_t size = context.num_stages * kNameLength;
    torch::Tensor own = torch::zeros({size}, torch::kByte);
    for (const auto& stage : stages) {
      const std::string name = stage.layers.back().name.substr(0, kNameLength);
      std::copy(
          name.begin(), name.end(),
          own.data_ptr<uint8_t>() + stage.stage * kNameLength);
    }
    own = own.to(options.device);
    torch::Tensor all = torch::empty({size * group.size()}, like(torch::kByte));
    group.all_gather(all, own, {.label = "names of layers"});
    all = all.cpu();
    for (int32_t stage = 0; stage < context.num_stages; ++stage) {
      const auto* at = reinterpret_cast<const char*>(
          all.data_ptr<uint8_t>() + schedule.rank_of_stage[stage] * size +
          stage * kNameLength);
      context.last_layers.emplace_back(at, strnlen(at, kNameLength));
    }
  }

  void use_schedule() {
    schedule_print = fingerprint(schedule);
    plan = pipeline::plan_transfers(schedule, group.rank());
  }

  // Every schedule of these stages has the same pairs of ranks.
  void connect_peers() const {
    std::vector<int> peers;
    for (const auto& [peer, _] : plan.pairs) peers.push_back(peer);
    group.connect_peers(peers);
  }

  int64_t flags() const {
    Fingerprint print;
    for (const auto& stage : stages) {
      for (const auto& [_, tensor] : stage.named_parameters()) {
        print.add(tensor.requires_grad() ? 1 : 0);
      }
    }
    return print.value();
  }

  // Tells the other ranks what this one does. Finds the number of microbatches,
  // and the shapes recorded for them.
  RecordedShapes& agree(
      size_t call, const std::vector<Tensors>& microbatches, int64_t& count,
      int64_t agreed = 0) {
    if (agreed != 0) {
      if (const auto found = agreed_steps.find({agreed, schedule_print});
          found != agreed_steps.end()) {
        return *found->second;
      }
    }
    Fingerprint shapes;
    for (const auto& microbatch : microbatches) {
      shapes.add(pipeline::shape_of(microbatch, "a microbatch"));
    }
    const Words own = {
        static_cast<int64_t>(call), schedule_print,
        static_cast<int64_t>(microbatches.size()), shapes.value(), flags()};
    torch::Tensor row =
        torch::tensor(std::vector<int64_t>(own.begin(), own.end()))
            .to(options.device);
    torch::Tensor table = torch::empty(
        {static_cast<int64_t>(kWords) * group.size()}, like(torch::kInt64));
    group.all_gather(
        table, row, {.label = std::string("pipeline ") + kCalls.at(call)});
    table = table.cpu();
    const int64_t* words = table.data_ptr<int64_t>();
    check_agreement(words, own);
    count = words[schedule.rank_of_stage[0] * kWords + kMicrobatches];
    // The keys are the gathered tables, so that all ranks forget in the same
    // call.
    if (recorded.size() >= kRecorded) {
      recorded.clear();
      agreed_steps.clear();
    }
    auto& found = recorded[{words, words + table.numel()}];
    // A map's entries stay where they are while others are added.
    if (agreed != 0) agreed_steps[{agreed, schedule_print}] = &found;
    return found;
  }

  void check_agreement(const int64_t* words, const Words& own) const {
    for (int rank = 0; rank < group.size(); ++rank) {
      const int64_t* theirs = words + rank * static_cast<int64_t>(kWords);
      if (theirs[kCall] != own[kCall]) {
        throw ConfigError(format(
            "pipeline: rank {} calls {}, rank {} {}; every rank makes the same "
            "calls",
            rank, kCalls.at(static_cast<size_t>(theirs[kCall])), group.rank(),
            kCalls.at(static_cast<size_t>(own[kCall]))));
      }
      if (theirs[kSchedule] != own[kSchedule]) {
        throw ConfigError(format(
            "pipeline: rank {} has another schedule than rank {} (\"{}\"); all "
            "must have the same",
            rank, group.rank(), schedule.name));
      }
    }
  }

  void check_microbatches(
      const std::vector<Tensors>& microbatches, bool training) const {
    const bool first = context.local.front() >= 0;
    if (!first && !microbatches.empty()) {
      throw ConfigError(format(
          "pipeline: rank {} is given {} microbatches; the rank of stage 0 "
          "alone takes them",
          group.rank(), microbatches.size()));
    }
    const auto expected = static_cast<size_t>(schedule.num_microbatches);
    if (first && training && microbatches.size() != expected) {
      throw ConfigError(format(
          "pipeline: {} microbatches, but schedule \"{}\" is for {}; make one "
          "for that many",
          microbatches.size(), schedule.name, expected));
    }
  }

  // Refuses calls after one that failed, which leaves messages behind.
  template <class Call>
  auto once(Call&& call) {
    if (broken) {
      throw Error(
          "the pipeline is used after a call that failed; build a new one");
    }
    broken = true;
    auto result = call();
    broken = false;
    return result;
  }

  PipelineResult step(
      const std::vector<Tensors>& microbatches, const Loss& loss,
      int64_t agreed) {
    check_microbatches(microbatches, true);
    if (context.local.back() >= 0 && !loss) {
      throw ConfigError(format(
          "pipeline: rank {} holds the last stage and is given no loss "
          "function",
          group.rank()));
    }
    int64_t count = 0;
    RecordedShapes& shapes = agree(0, microbatches, count, agreed);
    pipeline::PipelineRun run(context, plan, shapes, true, microbatches, loss);
    run.run();
    if (options.after_backwards) options.after_backwards();
    tied.sum_gradients();
    return {std::move(run.losses), std::move(run.peak_stored)};
  }

  std::vector<Tensors> evaluate(const std::vector<Tensors>& microbatches) {
    check_microbatches(microbatches, false);
    int64_t count = 0;
    RecordedShapes& shapes = agree(1, microbatches, count);
    if (forward_plan.num_microbatches != count) {
      forward_plan = pipeline::plan_transfers(
          pipeline::forward_schedule(
              schedule.rank_of_stage, schedule.num_ranks(),
              static_cast<int32_t>(count)),
          group.rank());
    }
    pipeline::PipelineRun run(
        context, forward_plan, shapes, false, microbatches, nullptr);
    run.run();
    return std::move(run.outputs);
  }

  Group group;
  Schedule schedule;
  std::vector<PipelineStage> stages;
  PipelineOptions options;
  TiedParameters tied;
  pipeline::RunContext context{group, options, stages};
  TransferPlan plan;
  TransferPlan forward_plan;
  int64_t schedule_print = 0;
  std::map<std::vector<int64_t>, RecordedShapes> recorded;
  // By step()'s `shapes` and the schedule.
  std::map<std::pair<int64_t, int64_t>, RecordedShapes*> agreed_steps;
  bool broken = false;
};

Pipeline::Pipeline(
    Group group, Schedule schedule, std::vector<PipelineStage> stages,
    PipelineOptions options)
    : impl_(std::make_unique<Impl>(
          std::move(group), std::move(schedule), std::move(stages),
          std::move(options))) {}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

PipelineResult Pipeline::step(
    const std::vector<Tensors>& microbatches, const Loss& loss,
    int64_t shapes) {
  return impl_->once([&] { return impl_->step(microbatches, loss, shapes); });
}

std::vector<Tensors>
Pipeline::evaluate(const std::vector<Tensors>& microbatches) {
  return impl_->once([&] { return impl_->evaluate(microbatches); });
}

void Pipeline::set_schedule(Schedule schedule) {
  if (schedule.rank_of_stage != impl_->schedule.rank_of_stage) {
    throw ConfigError(format(
        "schedule \"{}\" puts the stages on other ranks than \"{}\"; build a "
        "new pipeline for it",
        schedule.name, impl_->schedule.name));
  }
  check(schedule);
  impl_->schedule = std::move(schedule);
  impl_->use_schedule();
}

const Schedule& Pipeline::schedule() const {
  return impl_->schedule;
}
const std::vector<PipelineStage>& Pipeline::stages() const {
  return impl_->stages;
}
bool Pipeline::has_first_stage() const {
  return impl_->context.local.front() >= 0;
}
bool Pipeline::has_last_stage() const {
  return impl_->context.local.back() >= 0;
}
const std::set<std::string>& Pipeline::duplicates() const {
  return impl_->tied.duplicates();
}

}  // namespace echelon
