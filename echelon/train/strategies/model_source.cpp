#include "echelon/train/strategies/model_source.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layers/ties.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/text/format.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

void check_same_layers(const LayerList& full, const LayerList& sharded) {
  if (full.names() == sharded.names()) return;
  throw ConfigError(format(
      "the list of layers that is sharded over tensor-parallel ranks has {} "
      "layers, the full one {}, or they have other names; let the function "
      "give the same layers for any number of ranks",
      sharded.size(), full.size()));
}

// Adds the ties of the complete list, where some may have been found.
LayerList with_ties_of(const LayerList& full, const LayerList& sharded) {
  check_same_layers(full, sharded);
  LayerList layers;
  for (const auto& definition : sharded.layers())
    layers.add_definition(definition);
  for (const auto& tie : full.ties()) layers.tie(tie.first, tie.second);
  return layers;
}

int64_t classes_of(const Job& job, const SampleSpec& sample) {
  if (is_language_model(job.model)) {
    return vocabulary(job.model, sample.classes);
  }
  return job.model.classes > 0 ? job.model.classes : sample.classes;
}

// What every source has of its data, with the objective that comes with it.
ModelSource source_for(const Job& job, const SampleSpec& sample) {
  ModelSource source;
  source.sample = sample;
  source.classes = classes_of(job, sample);
  source.objective =
      [sample, classes = source.classes](const TensorParallel& parallel) {
        return objective_for(sample, classes, parallel);
      };
  return source;
}

// Lists parameters and buffers, tied ones by their first name only.
void list_tensors(ModelSource& source, ModelDtype dtype) {
  for (const auto& definition : source.layers.layers()) {
    const BuiltLayer layer = counting::build_on_meta(definition);
    if (!layer.module) continue;
    const auto parameters = layer.module->named_parameters();
    for (const auto& [own_name, tensor] : state_dict(*layer.module)) {
      const std::string name = definition.name + "." + own_name;
      if (source.first_names.count(name) > 0) continue;
      const bool is_parameter = parameters.contains(own_name);
      if (is_parameter && !tensor.requires_grad()) source.frozen.insert(name);
      source.parameters.push_back(
          {.name = name,
           .shape = tensor.sizes().vec(),
           .kind = is_parameter ? ParameterInfo::Kind::parameter
                                : ParameterInfo::Kind::buffer,
           .dtype = tensor.is_floating_point() ? to_string(dtype) : "int64"});
    }
  }
}

// The same layers, each of whose modules `change` is given when it is built.
LayerList with_modules(
    const LayerList& given,
    const std::function<void(const std::string& layer, torch::nn::Module&)>&
        change) {
  LayerList layers;
  for (LayerDefinition definition : given.layers()) {
    definition.build = [change, name = definition.name,
                        build = definition.build] {
      BuiltLayer layer = build();
      if (layer.module) change(name, *layer.module);
      return layer;
    };
    layers.add_definition(std::move(definition));
  }
  for (const auto& tie : given.ties()) layers.tie(tie.first, tie.second);
  return layers;
}

// The same layers with parameters of this dtype.
LayerList in_dtype(const LayerList& given, torch::Dtype dtype) {
  return with_modules(
      given, [dtype](const std::string&, torch::nn::Module& module) {
        to_dtype(module, dtype);
      });
}

// The same layers, whose parameters of these names do not require gradients.
LayerList
with_frozen(const LayerList& given, const std::set<std::string>& names) {
  return with_modules(
      given, [names](const std::string& layer, torch::nn::Module& module) {
        for (auto& item : module.named_parameters()) {
          if (names.contains(layer + "." + item.key())) {
            item.value().set_requires_grad(false);
          }
        }
      });
}

// Freezes what does not train. `all` has every name of each parameter.
void freeze(
    ModelSource& source, const ModelOptions& options,
    const std::vector<ParameterInfo>& all) {
  const auto names = frozen_parameters(options, all);
  if (names.empty()) return;
  source.layers = with_frozen(source.layers, names);
  source.sharded = [names, given = std::move(source.sharded)](
                       const TensorParallel& parallel) {
    return with_frozen(given(parallel), names);
  };
  for (const auto& name : names) source.frozen.insert(source.first_name(name));
  if (!saves_adapters_alone(options)) return;
  for (const auto& name : source.frozen) {
    if (!is_adapter(name)) source.unsaved.insert(name);
  }
}

}  // namespace

torch::Dtype compute_dtype(const Job& job) {
  const ComputeDtype compute = job.precision.compute;
  if (compute == ComputeDtype::bf16 || compute == ComputeDtype::fp8) {
    return torch::kBFloat16;
  }
  if (compute == ComputeDtype::fp16) return torch::kHalf;
  return dtype_of(job.model.dtype);
}

torch::Dtype dtype_of(ModelDtype dtype) {
  return dtype == ModelDtype::float64 ? torch::kFloat64 : torch::kFloat32;
}

void to_dtype(torch::nn::Module& module, torch::Dtype dtype) {
  const auto convert = [dtype](const auto& tensors) {
    for (auto tensor : tensors) {
      if (tensor.is_floating_point() && tensor.scalar_type() != dtype) {
        tensor.set_data(tensor.detach().to(dtype));
      }
    }
  };
  convert(module.parameters());
  convert(module.buffers());
}

const std::string& ModelSource::first_name(const std::string& name) const {
  const auto found = first_names.find(name);
  return found == first_names.end() ? name : found->second;
}

int64_t ModelSource::num_parameters() const {
  return echelon::num_parameters(parameters);
}

ModelSource model_source(const Job& job, const SampleSpec& sample) {
  check_model_is_known(job.model);
  if (is_language_model(job.model) != is_text(sample)) {
    throw ConfigError(format(
        "[model] name=\"{}\" {}; use another model or other data",
        job.model.name,
        (is_text(sample)
             ? "tells classes apart, but each sample is a sequence of whole "
               "numbers with as many targets, which is a text"
             : "predicts the next token, but the samples are no texts: whole "
               "numbers, in one dimension, with as many targets")));
  }
  ModelSource source = source_for(job, sample);
  source.name = job.model.name;
  source.sharded = [model = job.model, shape = sample.input_shape,
                    classes = source.classes](const TensorParallel& parallel) {
    return model_layers(model, shape, classes, parallel);
  };
  source.layers = source.sharded({});
  const auto all =
      list_parameters(job.model, sample.input_shape, source.classes);
  for (const auto& info : all) {
    if (info.tied_to.empty()) {
      source.parameters.push_back(info);
    } else {
      source.first_names[info.name] = info.tied_to;
    }
  }
  freeze(source, job.model, all);
  return source;
}

std::optional<LanguageModelShape>
language_shape(const Job& job, const ModelSource& source) {
  if (!is_language_model(job.model)) return std::nullopt;
  return language_model_shape(job.model, source.classes);
}

std::set<std::string>
vocabulary_matrices(const Job& job, const ModelSource& source) {
  std::set<std::string> names;
  const auto shape = language_shape(job, source);
  if (!shape) return names;
  for (const auto& info : source.parameters) {
    if (info.shape.size() == 2 && info.shape[0] == shape->vocab_size) {
      names.insert(info.name);
    }
  }
  for (const auto& [other, first] : source.first_names) {
    if (names.contains(first)) names.insert(other);
  }
  return names;
}

ModelSource model_source(
    const Job& job, const LayerFactory& given, const SampleSpec& sample) {
  if (!given) return model_source(job, sample);
  if (job.model.lora.used()) {
    throw ConfigError(format(
        "[lora] rank={}: a list of layers of one's own gets no adapters; add "
        "them where it is built (add_adapters), and set [model] freeze",
        job.model.lora.rank));
  }
  const torch::Dtype dtype = dtype_of(job.model.dtype);
  ModelSource source = source_for(job, sample);
  const LayerList own = given({});
  source.name = own.name().empty() ? "own model" : own.name();
  source.layers = in_dtype(own, dtype);
  for (const auto& tie : find_ties(source.layers, counting::build_on_meta)) {
    source.layers.tie(tie.first, tie.second);
  }
  source.sharded = [given, dtype,
                    full = source.layers](const TensorParallel& parallel) {
    if (parallel.size() == 1 && !parallel.context.is_used()) return full;
    return with_ties_of(full, in_dtype(given(parallel), dtype));
  };
  for (const auto& group : tied_groups(source.layers)) {
    for (size_t i = 1; i < group.names.size(); ++i) {
      source.first_names[group.names[i]] = group.names[0];
    }
  }
  list_tensors(source, job.model.dtype);
  auto all = source.parameters;
  for (const auto& [name, first] : source.first_names) {
    all.push_back({.name = name, .tied_to = first});
  }
  freeze(source, job.model, all);
  return source;
}

LayerFactory whole_layers(const LayerList& layers) {
  return [layers](const TensorParallel& parallel) {
    if (parallel.size() > 1) {
      throw ConfigError(format(
          "[layout] tp={}: a list of layers of one's own is sharded when it is "
          "given as a function of TensorParallel; give one, or set tp = 1",
          parallel.size()));
    }
    if (parallel.context.is_used()) {
      throw ConfigError(format(
          "[layout] cp={}: a list of layers of one's own is given whole "
          "sequences; give a function of TensorParallel, whose attention uses "
          "its context, or set cp = 1",
          parallel.context.size()));
    }
    return layers;
  };
}

ModelSource
model_source(const Job& job, const OwnParts& own, const SampleSpec& sample) {
  ModelSource source = model_source(job, own.layers.factory(), sample);
  if (!own.layers.factory() && is_language_model(job.model)) {
    source.sharded_scores = source.classes;
  }
  if (own.objective) {
    source.objective =
        [objective = own.objective,
         scores = source.sharded_scores](const TensorParallel& parallel) {
          return with_whole_scores(objective, scores, parallel);
        };
  }
  for (const auto& metric : own.metrics) {
    if (metric.name.empty() || !metric.sums || metric.numbers < 1) {
      throw ConfigError(format(
          "metric \"{}\": it needs a name, a function `sums` and one number or "
          "more",
          metric.name));
    }
  }
  source.metrics = own.metrics;
  return source;
}

OwnLayers::OwnLayers(const LayerList& layers) : layers_(whole_layers(layers)) {}

Job with_own_names(Job job, const OwnParts& own) {
  if (own.layers.factory()) job.model.name = kOwnModel;
  if (own.dataset) job.data.name = DataKind::own;
  return job;
}

TrainingData data_of(const Job& job, const OwnParts& own) {
  if (own.dataset) {
    return split_own(own.dataset, own.holdout, job.data, job.train.seed);
  }
  if (own.holdout) {
    throw ConfigError(
        "a program's held-out data set needs a data set of its own too; set "
        "OwnParts::dataset");
  }
  return open_data(job.data, job.train.seed);
}

bool counts_units(const Dataset& dataset, const ModelSource& source) {
  return dataset.may_skip() || source.objective({})->counts_units();
}

bool draws_masks(const ModelOptions& model, const SampleSpec& sample) {
  return model.dropout > 0 && is_text(sample);
}

std::vector<counting::TensorSpec>
input_specs(const Job& job, const ModelSource& source, int64_t samples) {
  const auto& sample = source.sample;
  const auto shape = with_samples(samples, sample.input_shape);
  const auto parallel = silent_tensor_parallel(job);
  std::vector<counting::TensorSpec> specs = {
      {with_samples(samples, tokens_here(sample, parallel.context)),
       is_text(sample)
           ? torch::kInt64
           : (sample.ids ? sample.input_dtype : dtype_of(job.model.dtype))}};
  for (const auto& more : sample.more) {
    specs.push_back(
        {with_samples(samples, more.shape), c10::isFloatingType(more.dtype)
                                                ? dtype_of(job.model.dtype)
                                                : more.dtype});
  }
  const bool shards_tokens =
      parallel.splits_tokens() || parallel.context.is_used();
  if (is_text(sample) && shards_tokens && sample.more.empty()) {
    specs.push_back({shape, torch::kInt64});  // documents: objective.h
  }
  if (draws_masks(job.model, sample))
    specs.push_back({{samples}, torch::kInt64});
  return specs;
}

std::vector<int64_t>
tokens_here(const SampleSpec& sample, const ContextParallel& context) {
  auto shape = sample.input_shape;
  if (context.is_used() && is_text(sample)) {
    shape[0] = context.length_of(shape[0]);
  }
  return shape;
}

std::vector<int64_t>
with_samples(int64_t samples, const std::vector<int64_t>& shape) {
  std::vector<int64_t> full = {samples};
  full.insert(full.end(), shape.begin(), shape.end());
  return full;
}

int64_t passes_per_step(const Job& job) {
  return job.layout.pp > 1 ? microbatches_of(job) : job.train.accumulate;
}

MeshGroups mesh_groups(World& world, const Job& job) {
  return {world, job.layout, head_ranks(job.context, job.layout.cp)};
}

namespace {

bool may_have_borders(const Job& job) {
  return job.data.documents == Documents::respected ||
         job.data.name == DataKind::own;
}

}  // namespace

TensorParallel tensor_parallel(const Job& job, const MeshGroups& groups) {
  return {
      groups.along(Axis::tp),
      job.tensor,
      {groups.along(Axis::cp), job.context, groups.context_heads(),
       groups.context_keys()},
      groups.along(Axis::ep),
      job.precision.compute == ComputeDtype::fp8,
      may_have_borders(job)};
}

TensorParallel silent_tensor_parallel(const Job& job, int rank) {
  return {
      Group::silent("tp", rank, static_cast<int>(job.layout.tp)),
      job.tensor,
      ContextParallel::silent(0, static_cast<int>(job.layout.cp), job.context),
      Group::silent("ep", 0, static_cast<int>(job.layout.ep)),
      job.precision.compute == ComputeDtype::fp8,
      may_have_borders(job)};
}

}  // namespace echelon
