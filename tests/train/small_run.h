// Small models in all layouts, trained step by step: shared by tests of saving.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "echelon/data/loader.h"
#include "echelon/train/saving/saved_state.h"
#include "tests/data/sources/make_tokens.h"
#include "tests/support/temp_folder.h"
#include "tests/train/layouts.h"

namespace echelon {

/// A job with its name in messages.
struct SmallCase {
  std::string name;
  Job job;
};

inline std::string write_tokens(TempFolder& folder) {
  std::vector<uint16_t> ids;
  for (uint32_t i = 0; i < 600; ++i) {
    ids.push_back(static_cast<uint16_t>((i * i * 7 + i / 3) % 59));
  }
  // Beside them, the same with a mask: of each three times 40 tokens, a part of
  // the second ones counts.
  std::string mask;
  for (size_t i = 0; i < ids.size(); ++i) {
    mask += static_cast<char>(i / 40 % 3 == 1 && i % 7 < 5);
  }
  folder.write("masked.bin", raw_bytes(ids));
  folder.write("masked.mask", mask);
  return folder.write("tokens.bin", raw_bytes(ids));
}

/// Five heads, tied embeddings, and sizes that no degree divides.
inline ModelOptions tiny_gpt() {
  return {
      .name = "gpt",
      .layers = 2,
      .hidden_size = 20,
      .heads = 5,
      .intermediate_size = 45,
      .vocab_size = 67,
      .max_positions = 12};
}

inline Job small_gpt(const std::string& tokens) {
  Job job;
  job.model = tiny_gpt();
  job.model.dtype = ModelDtype::float64;
  job.data.name = DataKind::text;
  job.data.sources = {tokens};
  job.data.vocab_size = 67;
  job.data.sequence = 11;
  job.train.batch = 8;
  job.train.steps = 8;
  job.optimizer.name = OptimizerKind::adamw;
  job.optimizer.learning_rate = 1e-3;
  job.optimizer.weight_decay = 0.1;
  return job;
}

inline Job small_mlp() {
  Job job;
  job.model.name = "mlp";
  job.model.hidden = {17, 13, 11, 7};
  job.model.dtype = ModelDtype::float64;
  job.train.batch = 12;
  job.train.steps = 8;
  job.optimizer.name = OptimizerKind::sgd;
  job.optimizer.momentum = 0.9;
  job.optimizer.learning_rate = 0.01;
  return job;
}

/// A user's layers: batch statistics, a layer without parameters, a frozen
/// weight.
inline LayerList own_layers() {
  LayerList list;
  list.add("conv", [] {
    // A bias would have no gradient but rounding.
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 3, 3).bias(false));
  });
  list.add("norm", [] { return torch::nn::BatchNorm2d(3); });
  list.add_function(
      "flat", [](const torch::Tensor& x) { return x.flatten(1); });
  list.add("frozen", [] {
    torch::nn::Linear layer(108, 9);
    layer->weight.set_requires_grad(false);
    return layer;
  });
  list.add("out", [] { return torch::nn::Linear(9, 10); });
  return list;
}

/// A rank's model, its data and its place in both.
class SmallRun {
 public:
  SmallRun(const Job& job, World& world, const LayerFactory& layers = {})
      : job_(job),
        data_(open_data(job.data, 0)),
        world(world),
        groups(world, job.layout),
        source(model_source(job, layers, data_.train->spec())),
        state(job_, {source, world, groups}, job.train.steps),
        loader_(*data_.train, loader_options()) {}

  /// Steps [from, to) of the run; others may have done those before, or itself
  /// with other values.
  void train(int64_t from, int64_t to) {
    if (from < next_) {
      loader_.start_epoch(0);
      next_ = 0;
    }
    for (; next_ < from; ++next_) loader_.next();
    for (; next_ < to; ++next_) {
      state.model().forward_backward(next_batch(), counts_units());
      state.update(next_, false, nullptr);
    }
  }

  Batch next_batch() { return *loader_.next(); }
  bool counts_units() const {
    return echelon::counts_units(*data_.train, source);
  }

 private:
  LoaderOptions loader_options() const {
    LoaderOptions options;
    options.samples = data_.train_samples;
    options.global_batch = job_.train.batch;
    options.rank = groups.data_index();
    options.num_ranks = groups.data_ranks();
    options.seed = 1;
    options.sample_keys = draws_masks(job_.model, data_.train->spec());
    return options;
  }

  const Job job_;
  const TrainingData data_;

 public:
  World& world;
  MeshGroups groups;
  ModelSource source;
  TrainingState state;

 private:
  Loader loader_;
  int64_t next_ = 0;
};

inline std::vector<StateShard> parts_to_save(const SmallRun& run) {
  return shards_to_save(run.state, run.source, run.world, run.groups);
}

inline void on_ranks(
    const Job& job, const std::function<void(SmallRun&)>& body,
    const LayerFactory& layers = {}) {
  run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
    at::set_num_threads(1);
    SmallRun run(job, world, layers);
    body(run);
  });
}

/// What a rank has of each tensor, found without the code under test:
/// parameters, buffers, and the optimizer's state, which is laid out as the
/// parameter is in what the optimizer updates.
inline std::vector<std::pair<std::string, LocalParameter>>
parts_by_name(const SmallRun& run) {
  std::vector<std::pair<std::string, LocalParameter>> all;
  std::map<std::string, torch::Tensor> updated;
  for (const auto& group : run.state.optimizer().groups()) {
    for (const auto& [name, tensor] : group.parameters) updated[name] = tensor;
  }
  const auto states = run.state.optimizer().state();
  for (const auto& part : run.state.model().parameters()) {
    const std::string& name = run.source.first_name(part.name);
    all.emplace_back(name, part);
    const auto* begin = static_cast<const char*>(part.value.const_data_ptr());
    const int64_t bytes = static_cast<int64_t>(part.value.nbytes());
    for (const auto& [state_name, state] : states) {
      const size_t slash = state_name.rfind('/');
      const auto& whole = updated.at(state_name.substr(0, slash));
      const auto at = begin - static_cast<const char*>(whole.const_data_ptr());
      if (bytes == 0 || at < 0 || !whole.requires_grad() ||
          at + bytes > static_cast<int64_t>(whole.nbytes())) {
        continue;
      }
      LocalParameter beside = part;
      const bool number = state.dim() == 0;
      beside.value = number ? state
                            : state.flatten()
                                  .narrow(
                                      0, at / part.value.element_size(),
                                      part.value.numel())
                                  .view(part.value.sizes());
      if (number) beside.shard.reset(), beside.range.reset();
      all.emplace_back(name + state_name.substr(slash), beside);
    }
  }
  for (const auto& part : run.state.model().buffers()) {
    all.emplace_back(run.source.first_name(part.name), part);
  }
  return all;
}

/// Adds `base` with this layout; returns the case's job.
inline Job& add_case(
    std::vector<SmallCase>& all, const Job& base, const std::string& name,
    const Layout& layout) {
  all.push_back({name, base});
  all.back().job.layout = layout;
  return all.back().job;
}

/// The layouts of the tests, of up to 6 ranks.
inline std::vector<SmallCase> small_cases(const Job& base) {
  std::vector<SmallCase> all;
  const auto add = [&](const std::string& name, const Layout& layout) -> Job& {
    return add_case(all, base, name, layout);
  };
  add("one device", {});
  add("dp=2", {.dp_replicate = 2});
  for (const int64_t stage : {1, 2, 3}) {
    add("fsdp=2 stage " + std::to_string(stage), {.dp_shard = 2}).shard.stage =
        stage;
  }
  add("fsdp=3", {.dp_shard = 3});
  add("dp=2,fsdp=2", {.dp_replicate = 2, .dp_shard = 2});
  add("tp=2", {.tp = 2});
  add("tp=3", {.tp = 3});
  add("tp=3, sequence parallel", {.tp = 3}).tensor.sequence_parallel = true;
  add("pp=2", {.pp = 2});
  Job& interleaved = add("pp=2, interleaved", {.pp = 2});
  interleaved.pipeline.schedule = ScheduleKind::interleaved;
  interleaved.pipeline.stages_per_rank = 2;
  add("dp=2,pp=2", {.dp_replicate = 2, .pp = 2});
  add("tp=2,pp=2", {.tp = 2, .pp = 2});
  add("fsdp=2,tp=2", {.dp_shard = 2, .tp = 2});
  add("fsdp=2,tp=3, sequence parallel", {.dp_shard = 2, .tp = 3})
      .tensor.sequence_parallel = true;
  add("fsdp=2,pp=2", {.dp_shard = 2, .pp = 2});
  return all;
}

}  // namespace echelon
