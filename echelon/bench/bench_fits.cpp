#include "echelon/bench/bench_fits.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace echelon {
namespace {

double as_double(int64_t value) {
  return static_cast<double>(value);
}

// Each is a difference of times.
double usual(std::vector<double> differences) {
  return differences.empty() ? 0
                             : std::max(0.0, median(std::move(differences)));
}

double slower_pass(const SmallSeconds& seconds, int64_t stages) {
  return seconds.pass - as_double(stages) * seconds.elsewhere -
         seconds.plain_pass;
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) / 2];
}

Launches fit_launches(
    const OperatorCounts& a, double a_seconds, const OperatorCounts& b,
    double b_seconds) {
  const double determinant = a.computing * b.views - b.computing * a.views;
  const double view =
      (a.computing * b_seconds - b.computing * a_seconds) / determinant;
  const double computing =
      (a_seconds * b.views - b_seconds * a.views) / determinant;
  if (view > 0 && computing > 0) return {computing, view};
  const double each =
      (a_seconds + b_seconds) / (a.computing + a.views + b.computing + b.views);
  return {each, each};
}

double usual_largest(int64_t ranks) {
  const double below = std::pow(0.5, 1 / static_cast<double>(ranks));
  double least = 0, most = 10;  // one rank: 0
  for (int halving = 0; halving < 60; ++halving) {
    const double middle = (least + most) / 2;
    const double share = 0.5 * std::erfc(-middle / std::sqrt(2.0));
    (share < below ? least : most) = middle;
  }
  return least;
}

double fit_jitter(int64_t ranks, double seconds, double waiting) {
  if (ranks < 2 || !(seconds > 0)) return 0;
  const double one =
      waiting / (usual_largest(ranks) * std::sqrt(seconds / 1e-3));
  return std::max(0.0, one);
}

double longer_than_predicted(
    const SmallSeconds& seconds, int64_t stages, int64_t microbatches,
    double predicted) {
  const double times = as_double(microbatches + stages - 1);
  const double slower = slower_pass(seconds, stages) / as_double(stages);
  return seconds.step - times * (seconds.elsewhere + slower) - predicted;
}

double fit_operator(
    const std::vector<SmallSeconds>& rounds, int64_t stages, double kinds) {
  std::vector<double> slower;
  for (const SmallSeconds& round : rounds) {
    slower.push_back(slower_pass(round, stages) / kinds);
  }
  return usual(std::move(slower));
}

HostWork fit_host_work(
    const SmallSteps& steps, const std::vector<std::vector<double>>& beside) {
  const Microbatches& counts = steps.of_data;
  std::vector<double> pass, layer, least;
  for (const auto& seconds : beside) {
    const double few = seconds[0], more_passes = seconds[1],
                 more_layers = seconds[2];
    pass.push_back((more_passes - few) / as_double(counts.many - counts.few));
    layer.push_back(
        (more_layers - few) / as_double(steps.many_layers - steps.few_layers));
    least.push_back(few);
  }
  HostWork work;
  work.pass_seconds = usual(std::move(pass));
  work.layer_seconds = usual(std::move(layer));
  work.step_seconds = std::max(
      0.0, usual(std::move(least)) - as_double(counts.few) * work.pass_seconds -
               as_double(steps.few_layers) * work.layer_seconds);
  return work;
}

HostWork with_pipeline_work(
    HostWork work, const SmallSteps& steps,
    const std::vector<std::vector<double>>& beside) {
  if (steps.ranks == 1) return work;
  const Microbatches& counts = steps.of_pipeline;
  std::vector<double> action, least;
  for (const auto& seconds : beside) {
    const double microbatch =
        (seconds[1] - seconds[0]) / as_double(counts.many - counts.few);
    action.push_back(microbatch / 2);  // forwards and backwards
    least.push_back(seconds[0]);
  }
  work.action_seconds = usual(std::move(action));
  // The other stages wait for the first microbatch and for the last.
  const double actions = 2 * as_double(counts.few + steps.ranks - 1);
  work.pipeline_seconds =
      std::max(0.0, usual(std::move(least)) - actions * work.action_seconds);
  return work;
}

}  // namespace echelon
