// The list of layers cut over the ranks of a pipeline; each stage data parallel.
#include <algorithm>
#include <map>

#include "echelon/error.h"
#include "echelon/models/ties.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/data/coalesced.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/train/model_cut.h"
#include "echelon/train/parallel_model.h"
#include "echelon/train/pipeline_schedule.h"

namespace echelon {
namespace {

bool is_finite(const torch::Tensor& tensor) {
  return !tensor.is_floating_point() || tensor.numel() == 0 ||
         at::isfinite(tensor).all().item<bool>();
}

bool all_finite(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_finite);
}

/// Looks at what layers compute, while it is asked to.
class Probe {
 public:
  void begin() { active_ = true, found_.reset(); }
  std::optional<NonFinite> end() {
    active_ = false;
    return found_;
  }

  void look(
      const std::string& layer,
      const torch::nn::Module* module,
      const Tensors& inputs,
      const Tensors& outputs,
      bool first) {
    if (!active_ || found_) return;
    if (first && !all_finite(inputs)) {
      found_ = NonFinite{"input", "input"};
      return;
    }
    if (module != nullptr) {
      for (const auto& item : module->named_parameters()) {
        if (!is_finite(item.value())) {
          found_ = NonFinite{layer, "parameter " + layer + "." + item.key()};
          return;
        }
      }
    }
    if (!all_finite(outputs)) found_ = NonFinite{layer, "output"};
  }

 private:
  bool active_ = false;
  std::optional<NonFinite> found_;
};

class PipelineModel : public ParallelModel {
 public:
  PipelineModel(const Job& job, const ModelPlace& place);

  Score forward_backward(const Batch& batch, bool count_units) override;
  Score evaluate(const Batch& batch) override;
  std::optional<NonFinite> find_nonfinite(const Batch& batch) override;
  NamedTensors parameters() const override;
  NamedTensors state() const override;
  SumOverRanks sum_over_parts() const override;
  std::vector<std::string> describe() const override { return cut_.lines; }

 private:
  struct Stage {
    std::shared_ptr<Network> network;
    std::unique_ptr<DataParallelModule> parallel;
    std::unique_ptr<NoSync> local;  // while a step runs
  };

  void build_stages(const Job& job);
  PipelineStage pipeline_stage(int32_t index, const Stage& stage);
  std::vector<Batch> microbatches(const Batch& batch) const;
  // What the first stage takes; nothing on ranks without it.
  std::vector<Tensors> inputs(const std::vector<Batch>& microbatches) const;

  const Group group_;  // the pipeline
  const Group data_;   // the ranks with this rank's stages and other samples
  torch::Device device_;
  torch::Dtype dtype_;
  Schedule schedule_;
  std::unique_ptr<Objective> objective_;
  LayerList layers_;
  ModelCut cut_;
  std::shared_ptr<Probe> probe_ = std::make_shared<Probe>();
  std::map<int32_t, Stage> stages_;
  std::unique_ptr<Pipeline> pipeline_;
};

PipelineModel::PipelineModel(const Job& job, const ModelPlace& place)
    : group_(place.groups.along(Axis::pp)),
      data_(place.groups.data()),
      device_(place.world.device()),
      dtype_(dtype_of(job.model.dtype)),
      schedule_(pipeline_schedule(job)),
      objective_(objective_for(
          place.source.sample, place.source.classes, TensorParallel{})),
      layers_(place.source.layers),
      cut_(cut_into_stages(job, place.source, schedule_, place.world)) {
  announce(place, cut_.lines);
  build_stages(job);
  std::vector<PipelineStage> stages;
  for (const auto& [index, stage] : stages_) {
    stages.push_back(pipeline_stage(index, stage));
  }
  PipelineOptions options;
  options.ties = ties_across(layers_, cut_.boundaries);
  options.device = device_;
  options.recorder = place.recorder;
  options.before_last_backward = [this](int32_t stage) {
    stages_.at(stage).parallel->begin_reduction();
  };
  options.after_backwards = [this] {
    for (auto& [_, stage] : stages_) stage.parallel->finish_reduction();
  };
  pipeline_ = std::make_unique<Pipeline>(
      group_, schedule_, std::move(stages), std::move(options));
}

void PipelineModel::build_stages(const Job& job) {
  for (const int32_t index : schedule_.stages_of(group_.rank())) {
    const auto at = static_cast<size_t>(index);
    Stage stage;
    stage.network = build_network(
        layers_, cut_.boundaries[at], cut_.boundaries[at + 1], job.train.seed);
    if (!job.model.weights.empty()) {
      load_weights(*stage.network, job.model.weights);
    }
    to_dtype(*stage.network, dtype_);
    stage.network->to(device_);
    stage.network->train();
    stage.parallel = std::make_unique<DataParallelModule>(
        *stage.network, data_, data_parallel_options(job));
    stages_.emplace(index, std::move(stage));
  }
}

PipelineStage PipelineModel::pipeline_stage(int32_t index, const Stage& stage) {
  PipelineStage result = stage_of(*stage.network, index);
  bool first = index == 0;
  for (auto& [name, layer] : result.layers) {
    layer.forward = [probe = probe_, name = name, layer = layer,
                     first](const Tensors& inputs) {
      Tensors outputs = layer.forward(inputs);
      probe->look(name, layer.module.get(), inputs, outputs, first);
      return outputs;
    };
    first = false;
  }
  return result;
}

std::vector<Batch> PipelineModel::microbatches(const Batch& batch) const {
  const int64_t count = schedule_.num_microbatches;
  const int64_t size = batch.inputs.size(0);
  std::vector<Batch> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = size * i / count;
    pieces.push_back(
        piece_of(batch, begin, size * (i + 1) / count - begin));
  }
  return pieces;
}

std::vector<Tensors>
PipelineModel::inputs(const std::vector<Batch>& microbatches) const {
  std::vector<Tensors> inputs;
  if (!pipeline_->has_first_stage()) return inputs;
  for (const auto& one : microbatches) inputs.push_back(inputs_of(one));
  return inputs;
}

Score PipelineModel::forward_backward(const Batch& raw, bool count_units) {
  const Batch batch = objective_->prepared(raw, device_, dtype_);
  const double scale = loss_scale(*objective_, batch, data_, count_units);
  for (auto& [_, stage] : stages_) {
    stage.parallel->sync_buffers();
    stage.local.reset(new NoSync(stage.parallel->no_sync()));
  }
  Score score;
  const auto pieces = microbatches(batch);
  pipeline_->step(
      inputs(pieces), [&](const Tensors& outputs, int64_t microbatch) {
        const auto& targets = pieces[static_cast<size_t>(microbatch)].targets;
        const auto sum = objective_->loss_sum(outputs, targets);
        objective_->add_to(score, outputs, targets, sum);
        return sum * scale;
      });
  for (auto& [_, stage] : stages_) stage.local.reset();
  return score;
}

Score PipelineModel::evaluate(const Batch& raw) {
  const torch::NoGradGuard no_grad;
  const Batch batch = objective_->prepared(raw, device_, dtype_);
  Score score;
  if (batch.inputs.size(0) == 0) return score;
  const auto pieces = microbatches(batch);
  for (auto& [_, stage] : stages_) stage.network->eval();
  const auto outputs = pipeline_->evaluate(inputs(pieces));
  for (auto& [_, stage] : stages_) stage.network->train();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& targets = pieces[i].targets;
    objective_->add_to(
        score, outputs[i], targets,
        objective_->loss_sum(outputs[i], targets));
  }
  return score;
}

std::optional<NonFinite> PipelineModel::find_nonfinite(const Batch& raw) {
  const Batch batch = objective_->prepared(raw, device_, dtype_);
  probe_->begin();
  pipeline_->evaluate(inputs(microbatches(batch)));
  const auto found = probe_->end();
  // Of all stages' findings the one of the earliest layer.
  std::vector<std::string> lines;
  if (found) lines = {found->layer, found->what};
  const auto all = gather_lines(lines, group_, device_, "first NaN");
  const auto position = [&](const std::string& layer) {
    return std::find(cut_.layers.begin(), cut_.layers.end(), layer);
  };
  std::optional<NonFinite> first;
  for (const auto& one : all) {
    if (one.empty()) continue;
    if (one[0] == "input") return NonFinite{one[0], one[1]};
    if (!first || position(one[0]) < position(first->layer)) {
      first = NonFinite{one[0], one[1]};
    }
  }
  return first;
}

NamedTensors PipelineModel::parameters() const {
  NamedTensors all;
  for (const auto& [_, stage] : stages_) {
    for (const auto& item : stage.network->named_parameters()) {
      all.emplace_back(item.key(), item.value());
    }
  }
  return all;
}

NamedTensors PipelineModel::state() const {
  NamedTensors all;
  for (const auto& [_, stage] : stages_) {
    const auto own = state_dict(*stage.network);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

SumOverRanks PipelineModel::sum_over_parts() const {
  return [this](torch::Tensor& squared_norm) {
    // What an earlier stage owns is counted there.
    for (const auto& [name, parameter] : parameters()) {
      if (pipeline_->duplicates().count(name) > 0 &&
          parameter.grad().defined()) {
        squared_norm -=
            parameter.grad().to(torch::kFloat64).square().sum();
      }
    }
    group_.all_reduce(squared_norm, ReduceOp::sum, {.label = "gradient norm"})
        .wait();
  };
}

}  // namespace

std::unique_ptr<ParallelModel>
make_pipeline_model(const Job& job, const ModelPlace& place) {
  return std::make_unique<PipelineModel>(job, place);
}

}  // namespace echelon
