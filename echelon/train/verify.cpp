#include "echelon/train/verify.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/comm/mesh_groups.h"
#include "echelon/data/loader.h"
#include "echelon/error.h"
#include "echelon/train/step.h"

namespace echelon {
namespace {

/// Everything of one step that is compared.
struct Snapshot {
  double loss_sum = 0;
  double count = 0;
  std::vector<torch::Tensor> gradients;
  std::vector<torch::Tensor> parameters;
};

/// The job's steps on `group`, or on one device when it has one rank.
class Run {
 public:
  Run(const Job& job, const TrainingData& data, const Group& group,
      int64_t data_index, int64_t data_degree, torch::Device device,
      int64_t steps)
      : data_(data),
        loader_(*data.train, loader_options(job, data, data_index, data_degree)),
        state_(job, data.train->spec().input_shape,
               job.model.classes > 0 ? job.model.classes
                                     : data.train->spec().classes,
               std::max(steps, total_steps(job, loader_.batches_per_epoch())),
               group, device) {}

  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const auto& item : state_.network().named_parameters()) {
      names.push_back(item.key());
    }
    return names;
  }

  Snapshot step(int64_t index, const std::string& planted) {
    auto batch = loader_.next();
    if (!batch) {
      loader_.start_epoch(++epoch_);
      batch = loader_.next();
    }
    Snapshot snapshot;
    const Score score =
        state_.forward_backward(*batch, data_.train->may_skip(), nullptr);
    snapshot.loss_sum = score.loss_sum;
    snapshot.count = static_cast<double>(score.count);
    for (auto& item : state_.network().named_parameters()) {
      torch::NoGradGuard no_grad;
      auto& gradient = item.value().mutable_grad();
      if (gradient.defined() && item.key() == planted) gradient.mul_(2);
      snapshot.gradients.push_back(
          gradient.defined() ? gradient.clone()
                             : torch::zeros_like(item.value()));
    }
    state_.update(index, false, nullptr);
    for (const auto& parameter : state_.network().parameters()) {
      snapshot.parameters.push_back(parameter.detach().clone());
    }
    return snapshot;
  }

 private:
  static LoaderOptions loader_options(
      const Job& job, const TrainingData& data, int64_t index,
      int64_t degree) {
    LoaderOptions options;
    options.samples = data.train_samples;
    options.global_batch = job.train.batch;
    options.rank = index;
    options.num_ranks = degree;
    if (degree > 1) options.rank_batch = job.train.rank_batch;
    options.seed = job.train.seed;
    options.shuffle = job.data.shuffle;
    options.workers = job.data.workers;
    return options;
  }

  const TrainingData& data_;
  Loader loader_;
  TrainingState state_;
  int64_t epoch_ = 0;
};

double relative(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (actual.numel() == 0) return 0;
  const double scale = expected.abs().max().item<double>();
  const double difference = (actual - expected).abs().max().item<double>();
  if (!std::isfinite(difference)) return INFINITY;
  return scale > 0 ? difference / scale : difference;
}

/// The differences of one step on this rank, in an order that all ranks share.
std::vector<double> compare(
    World& world, const Snapshot& mine, const Snapshot* reference) {
  auto sums = torch::tensor({mine.loss_sum, mine.count}, torch::kFloat64);
  world.group().all_reduce(sums);
  auto loss = torch::zeros({1}, torch::kFloat64);
  if (reference != nullptr) loss[0] = reference->loss_sum / reference->count;
  world.group().broadcast(loss, 0);
  std::vector<double> differences = {relative(sums[0] / sums[1], loss[0])};
  const auto compare_all = [&](const std::vector<torch::Tensor>& tensors,
                               const std::vector<torch::Tensor>* expected) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      torch::Tensor one = expected != nullptr
          ? (*expected)[i].to(tensors[i].device()).contiguous()
          : torch::empty_like(tensors[i], at::MemoryFormat::Contiguous);
      world.group().broadcast(one, 0);
      differences.push_back(relative(tensors[i], one));
    }
  };
  compare_all(mine.gradients, reference ? &reference->gradients : nullptr);
  compare_all(mine.parameters, reference ? &reference->parameters : nullptr);
  return differences;
}

bool has_batch_norm(const Job& job) {
  return job.model.name.rfind("resnet", 0) == 0;
}

}  // namespace

VerifyResult verify(
    const Job& given, World& world, const VerifyOptions& options) {
  Job job = given;
  job.model.dtype = "float64";
  const MeshGroups groups(world, job.layout);
  const TrainingData data = open_data(job.data, job.train.seed);
  const Group single = world.new_group("one device", {world.rank()});

  std::unique_ptr<Run> reference;
  if (world.rank() == 0) {
    Job one = job;
    one.layout = Layout{};
    one.train.accumulate = 1;
    reference = std::make_unique<Run>(
        one, data, single, 0, 1, world.device(), options.steps);
  }
  Run layout(job, data, groups.data(), groups.data_index(),
             groups.data().size(), world.device(), options.steps);
  const auto names = layout.names();
  std::string planted = options.plant_error;
  if (planted == "first") planted = names.front();
  if (!planted.empty() &&
      std::find(names.begin(), names.end(), planted) == names.end()) {
    throw ConfigError("verify: no parameter is called \"" + planted + "\"");
  }

  VerifyResult result{.steps = options.steps};
  std::vector<Difference> all;
  for (int64_t step = 0; step < options.steps; ++step) {
    const Snapshot mine = layout.step(step, planted);
    std::optional<Snapshot> expected;
    if (reference) expected = reference->step(step, "");
    const auto differences =
        compare(world, mine, expected ? &*expected : nullptr);
    auto gathered = torch::empty(
        {world.size(), static_cast<int64_t>(differences.size())},
        torch::kFloat64);
    world.group().all_gather(gathered, torch::tensor(differences, torch::kFloat64));
    const auto [largest, where] = gathered.max(0);
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
  if (!result.passed && world.size() > 1 && has_batch_norm(job) &&
      !job.model.sync_batch_norm) {
    result.hint =
        "this model normalises by batch statistics, which each rank takes over "
        "its own samples; [model] sync_batch_norm = true takes them over all";
  } else if (!result.passed && job.train.compress != "none") {
    result.hint = "[train] compress = \"" + job.train.compress +
                  "\" rounds gradients; set it to \"none\"";
  }
  return result;
}

std::string to_text(const VerifyResult& result, const VerifyOptions& options) {
  std::ostringstream text;
  text.precision(2);
  text << std::scientific;
  text << (result.passed ? "equal" : "DIFFERENT") << ": "
       << result.num_compared << " comparisons over " << result.steps
       << " steps, largest relative difference "
       << result.worst.front().relative << " (tolerance "
       << options.tolerance << ")\n";
  const size_t shown = result.passed ? 1 : result.worst.size();
  for (size_t i = 0; i < shown; ++i) {
    const auto& one = result.worst[i];
    text << "  " << one.relative << "  step " << one.step << "  rank "
         << one.rank << "  " << one.what << "\n";
  }
  if (!result.hint.empty()) text << "hint: " << result.hint << "\n";
  return text.str();
}

std::string to_json(const VerifyResult& result, const VerifyOptions& options) {
  nlohmann::ordered_json json;
  json["passed"] = result.passed;
  json["steps"] = result.steps;
  json["tolerance"] = options.tolerance;
  json["compared"] = result.num_compared;
  json["worst"] = nlohmann::ordered_json::array();
  for (const auto& one : result.worst) {
    json["worst"].push_back(
        {{"step", one.step}, {"rank", one.rank}, {"what", one.what},
         {"relative",
          std::isfinite(one.relative) ? nlohmann::ordered_json(one.relative)
                                      : nlohmann::ordered_json("infinite")}});
  }
  if (!result.hint.empty()) json["hint"] = result.hint;
  return json.dump();
}

}  // namespace echelon
