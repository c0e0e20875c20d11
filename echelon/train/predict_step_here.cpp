#include "echelon/train/predict_step_here.h"

#include <exception>

#include "echelon/error.h"
#include "echelon/explain/predict_run.h"
#include "echelon/train/counted_shape.h"

namespace echelon {
namespace {

JobFacts facts_of(const ModelSource& source) {
  JobFacts facts;
  facts.data.sample_shape = source.sample.input_shape;
  facts.classes = source.classes;
  facts.num_parameters = source.num_parameters();
  return facts;
}

Configured what_ran(
    const Job& job, const ModelSource& source, bool on_processor, bool own_layers) {
  if (!job.model.devices.empty()) {
    throw ConfigError(
        "[model] devices: a rank with several devices is not simulated");
  }
  if (own_layers && job.layout.tp > 1) {
    throw ConfigError(
        "a program's own layers are counted, and what ranks of tp send inside of "
        "them is not");
  }
  const bool count = own_layers || (on_processor && job.layout.tp == 1);
  if (!count) return configured(job, facts_of(source));
  return {
      .model = counted_shape(job, source), .strategy = configured_strategy(job)};
}

}  // namespace

StepPrediction predict_step_here(
    const Job& job, const ModelSource& source, const World& world, bool own_layers) {
  // The simulator is told what links a host has, and nothing of those between hosts.
  if (world.local_size() != world.size()) {
    return {
        .missing =
            "The links between the hosts of this run are not known, so that nothing "
            "is predicted. `echelon explain RUN --cluster FILE` takes a file that "
            "says them."};
  }
  const bool on_processor = world.device().is_cpu();
  const RunCluster here = cluster_of_run(world.size(), on_processor);
  if (!here.cluster) return {.missing = here.missing};
  try {
    return predict_step(
        what_ran(job, source, on_processor, own_layers), *here.cluster);
  } catch (const std::exception& error) {  // it may not cost the report
    return {.missing = std::string("Nothing is predicted: ") + error.what()};
  }
}

}  // namespace echelon
