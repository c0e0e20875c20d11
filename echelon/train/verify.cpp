// Two runs of the same steps in float64: one on the layout, one on rank 0
// alone. For each step rank 0 broadcasts the full gradients and parameters, one
// after the other, and every rank compares its parts of them under the name
// that a tied parameter has first. The differences have one order on all ranks,
// which then exchange them.
#include "echelon/train/verify.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/architecture/parameter_list.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/data/loader.h"
#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/text/units.h"
#include "echelon/train/chosen_ways.h"
#include "echelon/train/saving/resume.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/strategies/step.h"

namespace echelon {
namespace {

/// What is compared of one step, for the parameters that this rank has.
struct Snapshot {
  double loss_sum = 0;
  double count = 0;
  std::map<std::string, LocalParameter> gradients;  // `value` is one
  std::map<std::string, LocalParameter> parameters;
};

// `values` as the same part of its tensor as `part`.
LocalParameter copy_of(const LocalParameter& part, torch::Tensor values) {
  return {
      .name = part.name,
      .value = std::move(values),
      .shard = part.shard,
      .range = part.range};
}

/// Runs the job's steps on the layout of place.groups.
class Run {
 public:
  Run(const Job& job, const TrainingData& data, const ModelPlace& place,
      int64_t steps)
      : job_(job),
        data_(data),
        place_(place),
        loader_(*data.train, training_batches(job, data, place.groups)),
        source_(place.source),
        total_steps_(std::max(
            steps, total_steps(job.train, loader_.batches_per_epoch()))),
        state_(job, place, total_steps_) {}

  Snapshot step(int64_t index, const std::string& planted) {
    const World* together =
        job_.layout.num_ranks() > 1 ? &place_.world : nullptr;
    auto batch = next_batch(loader_, *data_.train, together);
    if (!batch) {
      loader_.start_epoch(loader_.position().epoch + 1);
      batch = next_batch(loader_, *data_.train, together);
    }
    if (!batch) throw DataError("verify: the data's stream has no sample");
    const torch::NoGradGuard no_grad;
    Snapshot snapshot;
    const auto score = forward_backward(*batch).totals();
    snapshot.loss_sum = score.loss_sum;
    snapshot.count = score.count;
    for (const auto& part : state_.model().parameters()) {
      const std::string& name = source_.first_name(part.name);
      auto gradient = part.gradient;
      if (gradient.defined() && name == planted) gradient.mul_(2);
      snapshot.gradients[name] = copy_of(
          part, gradient.defined() ? gradient.clone()
                                   : torch::zeros_like(part.value));
    }
    state_.update(index, false, nullptr);
    for (const auto& part : state_.model().parameters()) {
      snapshot.parameters[source_.first_name(part.name)] =
          copy_of(part, part.value.detach().clone());
    }
    return snapshot;
  }

  void save(int64_t step, const std::filesystem::path& folder) {
    CheckpointManifest now;
    now.step = step;
    now.total_steps = total_steps_;
    now.epoch = loader_.position().epoch;
    now.consumed = loader_.position().consumed;
    now.data = with_position(samples(), loader_.position().stream);
    Saver saver(job_, source_, place_.world, place_.groups, folder, nullptr);
    saver.save_and_wait(state_, now);
  }

  // What the checkpoint does not fill stays NaN.
  Resumed load(const std::string& from) {
    const torch::NoGradGuard no_grad;
    const auto forget = [](torch::Tensor tensor) {
      if (tensor.is_floating_point()) {
        tensor.fill_(std::numeric_limits<double>::quiet_NaN());
      }
    };
    for (const auto& part : state_.model().parameters()) {
      const bool saved =
          !source_.unsaved.contains(source_.first_name(part.name));
      if (saved) forget(part.value);
    }
    for (const auto& part : state_.model().buffers()) forget(part.value);
    for (const auto& [name, tensor] : state_.optimizer().state())
      forget(tensor);
    Resumed resumed = resume(
        {.candidates = find_checkpoints(from)}, job_, state_, source_,
        place_.world, place_.groups, samples());
    const auto& manifest = resumed.manifest;
    loader_.seek(
        {manifest.epoch, manifest.consumed, stream_position(manifest)});
    return resumed;
  }

 private:
  std::string samples() const { return describe_samples(job_, data_); }

  Score forward_backward(const Batch& batch) {
    const torch::AutoGradMode grad(true);
    return state_.model().forward_backward(
        batch, counts_units(*data_.train, source_));
  }

  const Job job_;
  const TrainingData& data_;
  const ModelPlace place_;
  Loader loader_;
  const ModelSource& source_;
  int64_t total_steps_;
  TrainingState state_;
};

double relative(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (actual.numel() == 0) return 0;
  const double scale = expected.abs().max().item<double>();
  const double difference = (actual - expected).abs().max().item<double>();
  if (!std::isfinite(difference)) return INFINITY;
  return scale > 0 ? difference / scale : difference;
}

/// The differences of one step on this rank, in an order that all ranks share:
/// the loss, then gradients and parameters in the order of `list`.
std::vector<double> compare(
    World& world, const std::vector<ParameterInfo>& list, const Snapshot& mine,
    const Snapshot* reference) {
  const auto numbers = torch::dtype(torch::kFloat64).device(world.device());
  auto sums = torch::tensor({mine.loss_sum, mine.count}, numbers);
  world.group().all_reduce(sums);
  auto loss = torch::zeros({1}, numbers);
  if (reference != nullptr) loss[0] = reference->loss_sum / reference->count;
  world.group().broadcast(loss, 0);
  std::vector<double> differences = {relative(sums[0] / sums[1], loss[0])};
  using Parts = std::map<std::string, LocalParameter>;
  const auto compare_all = [&](const Parts& own, const Parts* expected) {
    for (const auto& info : list) {
      auto one = torch::empty(info.shape, numbers);
      if (expected != nullptr) one.copy_(expected->at(info.name).value);
      world.group().broadcast(one, 0);
      const auto found = own.find(info.name);
      if (found == own.end()) {
        differences.push_back(0);
        continue;
      }
      const auto& part = found->second;
      differences.push_back(relative(
          part.value, local_values(one, part).to(part.value.device())));
    }
  };
  compare_all(mine.gradients, reference ? &reference->gradients : nullptr);
  compare_all(mine.parameters, reference ? &reference->parameters : nullptr);
  return differences;
}

std::vector<ParameterInfo> trained_parameters(const ModelSource& source) {
  std::vector<ParameterInfo> list;
  for (const auto& info : source.parameters) {
    if (info.kind == ParameterInfo::Kind::parameter) list.push_back(info);
  }
  return list;
}

bool has_batch_norm(const Job& job) {
  return job.model.name.rfind("resnet", 0) == 0;
}

Job in_float64(Job job, const OwnParts& own) {
  if (own.dataset) job.data.name = DataKind::own;
  job.model.dtype = ModelDtype::float64;
  job.precision = PrecisionOptions{};
  return job;
}

}  // namespace

void save_steps(
    const Job& given, World& world, int64_t steps,
    const std::filesystem::path& folder, const OwnParts& own) {
  const Job job = with_chosen_ways(in_float64(given, own), world);
  check_same_data(own, world);
  const MeshGroups groups = mesh_groups(world, job);
  const TrainingData data = data_of(job, own);
  const ModelSource source = model_source(job, own, data.train->spec());
  Run run(job, data, ModelPlace{source, world, groups}, steps);
  for (int64_t step = 0; step < steps; ++step) run.step(step, "");
  run.save(steps, folder);
}

VerifyResult verify(
    const Job& given, World& world, const VerifyOptions& options,
    const OwnParts& own) {
  const Job job = with_chosen_ways(in_float64(given, own), world);
  check_same_data(own, world);
  const MeshGroups groups = mesh_groups(world, job);
  const TrainingData data = data_of(job, own);
  const ModelSource source = model_source(job, own, data.train->spec());
  const auto list = trained_parameters(source);
  const MeshGroups alone = MeshGroups::alone(world);

  std::unique_ptr<Run> reference;
  if (world.rank() == 0) {
    Job one = job;
    one.layout = Layout{};
    one.train.accumulate = 1;
    one.model.devices.clear();
    one.memory = MemoryOptions{};
    reference = std::make_unique<Run>(
        one, data, ModelPlace{source, world, alone}, options.steps);
  }
  Run layout(job, data, ModelPlace{source, world, groups}, options.steps);
  std::vector<std::string> names;
  for (const auto& info : list) names.push_back(info.name);
  std::string planted = options.plant_error;
  if (planted == "first") planted = names.front();
  if (!planted.empty() &&
      std::find(names.begin(), names.end(), planted) == names.end()) {
    throw ConfigError("verify: no parameter is called \"" + planted + "\"");
  }

  VerifyResult result{.layout = to_string(job.layout), .steps = options.steps};
  std::vector<Difference> all;
  int64_t first = 0;
  if (!options.resume.empty()) {
    Resumed resumed = layout.load(options.resume);
    first = resumed.manifest.step;
    result.loaded = std::move(resumed.lines);
  }
  for (int64_t step = 0; reference && step < first; ++step) {
    reference->step(step, "");
  }
  for (int64_t step = first; step < first + options.steps; ++step) {
    const Snapshot mine = layout.step(step, planted);
    std::optional<Snapshot> expected;
    if (reference) expected = reference->step(step, "");
    const auto differences =
        compare(world, list, mine, expected ? &*expected : nullptr);
    const auto numbers = torch::dtype(torch::kFloat64).device(world.device());
    const auto gathered = torch::empty(
        {world.size(), static_cast<int64_t>(differences.size())}, numbers);
    world.group().all_gather(gathered, torch::tensor(differences, numbers));
    const auto [largest, where] = gathered.cpu().max(0);
    for (size_t i = 0; i < differences.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i);
      std::string what = "loss";
      if (i > 0 && i <= names.size()) {
        what = "gradient " + names[i - 1];
      } else if (i > names.size()) {
        what = "parameter " + names[i - 1 - names.size()];
      }
      all.push_back(
          {.step = step + 1,
           .what = what,
           .rank = static_cast<int>(where[at].item<int64_t>()),
           .relative = largest[at].item<double>()});
    }
  }
  result.num_compared = static_cast<int64_t>(all.size());
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.relative > b.relative;
  });
  result.passed = all.front().relative <= options.tolerance;
  all.resize(std::min<size_t>(all.size(), 10));
  result.worst = std::move(all);
  if (!result.passed && job.layout.pp > 1 && has_batch_norm(job) &&
      microbatches_of(job) > 1) {
    result.hint =
        "this model normalises by batch statistics, which a pipeline takes "
        "over each microbatch; [layout] microbatches = 1 takes them over the "
        "batch";
  } else if (
      !result.passed && world.size() > 1 && has_batch_norm(job) &&
      !job.model.sync_batch_norm) {
    result.hint =
        "this model normalises by batch statistics, which each rank takes over "
        "its own samples; [model] sync_batch_norm = true takes them over all";
  } else if (!result.passed && job.train.compress != Compression::none) {
    result.hint = "[train] compress = \"" + to_string(job.train.compress) +
                  "\" rounds gradients; set it to \"none\"";
  }
  return result;
}

VerifyResult verify(
    const Job& job, World& world, const VerifyOptions& options,
    const LayerFactory& layers) {
  return verify(job, world, options, OwnParts{.layers = layers});
}

VerifyResult verify(
    const Job& job, World& world, const VerifyOptions& options,
    const LayerList* layers) {
  return verify(
      job, world, options, layers ? whole_layers(*layers) : LayerFactory());
}

std::string to_text(const VerifyResult& result, const VerifyOptions& options) {
  std::ostringstream text;
  text.precision(2);
  text << std::scientific;
  for (const auto& line : result.loaded) text << "  " << line << "\n";
  const size_t shown = result.passed ? 1 : result.worst.size();
  for (size_t i = 0; i < shown; ++i) {
    const auto& one = result.worst[i];
    text << "  " << one.relative << "  step " << one.step << "  rank "
         << one.rank << "  " << one.what << "\n";
  }
  if (!result.hint.empty()) text << "hint: " << result.hint << "\n";
  text << (result.passed ? "equal" : "DIFFERENT") << ": "
       << counted(result.num_compared, "comparison") << " over "
       << counted(result.steps, "step") << ", largest relative difference "
       << result.worst.front().relative << " (tolerance " << options.tolerance
       << ")\n";
  return text.str();
}

std::string to_json(const VerifyResult& result, const VerifyOptions& options) {
  nlohmann::ordered_json json;
  json["passed"] = result.passed;
  json["layout"] = result.layout;
  json["steps"] = result.steps;
  json["tolerance"] = options.tolerance;
  json["compared"] = result.num_compared;
  json["worst"] = nlohmann::ordered_json::array();
  for (const auto& one : result.worst) {
    json["worst"].push_back(
        {{"step", one.step},
         {"rank", one.rank},
         {"what", one.what},
         {"relative", std::isfinite(one.relative)
                          ? nlohmann::ordered_json(one.relative)
                          : nlohmann::ordered_json("infinite")}});
  }
  if (!result.hint.empty()) json["hint"] = result.hint;
  if (!result.loaded.empty()) json["loaded"] = result.loaded;
  return json.dump();
}

}  // namespace echelon
