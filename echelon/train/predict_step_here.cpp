#include "echelon/train/predict_step_here.h"

#include <cstdio>
#include <exception>

#include "echelon/checkpoint/format/new_file.h"
#include "echelon/cost/counted_model.h"
#include "echelon/error.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"
#include "echelon/train/strategies/counted_shape.h"

namespace echelon {
namespace {

JobFacts facts_of(const ModelSource& source) {
  JobFacts facts;
  facts.data.sample_shape = source.sample.input_shape;
  facts.classes = source.classes;
  facts.num_parameters = source.num_parameters();
  return facts;
}

void write(const std::filesystem::path& path, const std::string& text) {
  NewFile file(path.string(), text.size(), NewFile::Under::beside);
  file.append(text.data(), text.size());
  file.move_into_place();
}

}  // namespace

RunLayers layers_of_run(
    const Job& job, const ModelSource& source, const World& world,
    bool own_layers) {
  RunLayers layers;
  if (!job.model.devices.empty()) {
    layers.missing =
        "Nothing is predicted: [model] devices: a rank with several devices is "
        "not "
        "simulated";
    return layers;
  }
  if (!counts_layers(job.layout, world.device().is_cpu(), own_layers))
    return layers;
  if (job.layout.tp > 1) {
    layers.missing =
        "Nothing is predicted: a program's own layers are counted, and what "
        "ranks of "
        "tp send inside of them is not";
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
  const auto path = folder / kCountedLayersFile;
  try {
    if (layers.counted) {
      write(path, counted_model_json(*layers.counted));
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

StepPrediction predict_step_here(
    const Job& job, const ModelSource& source, const World& world,
    const RunLayers& layers) {
  // The simulator knows the links within a host, but not those between hosts.
  if (world.local_size() != world.size()) {
    return {
        .missing =
            "The links between the hosts of this run are not known, so that "
            "nothing "
            "is predicted. `echelon explain RUN --cluster FILE` takes a file "
            "that "
            "says them."};
  }
  const RunCluster here = cluster_of_run(world.size(), world.device().is_cpu());
  if (!here.cluster) return {.missing = here.missing};
  if (!layers.missing.empty()) return {.missing = layers.missing};
  try {
    const Configured what =
        layers.counted ? configured_as_counted(*layers.counted, job, job)
                       : configured(job, facts_of(source));
    return predict_step(what, *here.cluster);
  } catch (const std::exception& error) {  // it must not end the report
    return {.missing = std::string("Nothing is predicted: ") + error.what()};
  }
}

}  // namespace echelon
