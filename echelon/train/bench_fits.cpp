#include "echelon/train/bench_fits.h"

#include <algorithm>
#include <utility>

namespace echelon {
namespace {

double as_double(int64_t value) { return static_cast<double>(value); }

// A step, cut into what each microbatch adds and what there is without any.
struct Parts {
  double microbatch = 0;
  double rest = 0;
};

Parts parts_of(const Microbatches& counts, double few, double many) {
  const double microbatch = (many - few) / as_double(counts.many - counts.few);
  return {microbatch, few - as_double(counts.few) * microbatch};
}

// Each is a difference of times.
double usual(std::vector<double> differences) {
  return differences.empty() ? 0
                             : std::max(0.0, median(std::move(differences)));
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 2];
}

Launches fit_launches(
    const OperatorCounts& a,
    double a_seconds,
    const OperatorCounts& b,
    double b_seconds) {
  const double determinant = a.computing * b.views - b.computing * a.views;
  const double view =
      (a.computing * b_seconds - b.computing * a_seconds) / determinant;
  const double computing =
      (a_seconds * b.views - b_seconds * a.views) / determinant;
  if (view > 0 && computing > 0) return {computing, view};
  const double each = (a_seconds + b_seconds) /
                      (a.computing + a.views + b.computing + b.views);
  return {each, each};
}

HostWork fit_host_work(
    const SmallSteps& steps,
    const std::vector<std::vector<double>>& rounds,
    double all_reduce_seconds) {
  std::vector<double> step, layer, action, pipeline;
  for (const auto& seconds : rounds) {
    const Parts few = parts_of(steps.of_data, seconds[0], seconds[1]);
    const Parts many = parts_of(steps.of_data, seconds[2], seconds[3]);
    layer.push_back(
        (many.rest - few.rest) /
        as_double(steps.many_layers - steps.few_layers));
    step.push_back(
        few.rest - as_double(steps.few_layers) * layer.back() -
        all_reduce_seconds);
    if (steps.ranks == 1) continue;
    // The last stage computes what a rank without a pipeline does.
    const Parts staged = parts_of(steps.of_pipeline, seconds[4], seconds[5]);
    action.push_back((staged.microbatch - few.microbatch) / 2);
    // The other stages wait for the first microbatch and for the last.
    const double bubble = as_double(steps.ranks - 1) * staged.microbatch;
    pipeline.push_back(staged.rest - few.rest - bubble);
  }
  return {
      .step_seconds = usual(std::move(step)),
      .layer_seconds = usual(std::move(layer)),
      .action_seconds = usual(std::move(action)),
      .pipeline_seconds = usual(std::move(pipeline))};
}

}  // namespace echelon
