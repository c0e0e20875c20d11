#include "echelon/bench/bench_host_work.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "echelon/bench/bench_fits.h"
#include "echelon/bench/small_training.h"
#include "echelon/cluster/local_machine.h"
#include "echelon/cost/host_seconds.h"
#include "echelon/cost/layer_work.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"
#include "echelon/train/strategies/counted_shape.h"

namespace echelon {
namespace {

constexpr int64_t kHostSteps = 10;
constexpr int64_t kHostRounds = 25;
constexpr Microbatches kOfData = {1, 5};
constexpr Microbatches kOfPipeline = {4, 16};
// Of passes elsewhere: none, a short and a long one.
const std::vector<int64_t> kElsewhere = {0, 1, 4};

Configured counted(const SmallSetting& setting) {
  const Job job = job_of(setting);
  const TrainingData data = open_data(job.data, 0);
  const ModelSource source = model_source(job, data.train->spec());
  return configured_as_counted(counted_shape(job, source), job, job);
}

double predicted_step(
    const SmallSetting& setting, const MachineMeasurement& measured) {
  return predict_step(counted(setting), cluster_of(measured, look_at_machine()))
      .step_seconds;
}

using Rounds = std::vector<std::vector<double>>;

// The steps and the passes of some networks, timed, and how long their steps
// are.
class SmallNetworks {
 public:
  SmallNetworks(BenchMeter& meter, World& world)
      : world_(world), elsewhere_(meter, kElsewhere) {}

  void add(const SmallSetting& setting) {
    settings_.push_back(setting);
    trainings_.push_back(
        std::make_unique<SmallTraining>(setting, elsewhere_, world_));
  }

  void measure(BenchMeter& meter) {
    std::vector<std::function<double()>> calls;
    for (size_t place = 0; place < kElsewhere.size(); ++place) {
      for (const auto& training : trainings_) {
        calls.push_back([this, place, &training] {
          elsewhere_.choose(place);
          return training->step();
        });
        calls.push_back([this, place, &training] {
          elsewhere_.choose(place);
          return training->pass();
        });
      }
    }
    rounds_ = meter.rounds_of_own_seconds(calls, kHostSteps, kHostRounds);
  }

  // What a rank of the first one computes of a microbatch, elsewhere as well.
  double computing_seconds(size_t place) const {
    std::vector<double> seconds;
    for (const auto& round : rounds_)
      seconds.push_back(round[at(place, 0) + 1]);
    return median(std::move(seconds));
  }

  // By which the steps of `count` networks from `first` on are longer than what
  // is predicted and than their layers are by themselves behind that place, by
  // round.
  Rounds beside(
      const MachineMeasurement& measured, size_t place, size_t first,
      size_t count) const {
    Rounds longer(rounds_.size());
    for (size_t i = first; i < first + count; ++i) {
      const SmallSetting& setting = settings_[i];
      const double predicted = predicted_step(setting, measured);
      const auto seconds = seconds_of(place, i);
      for (size_t round = 0; round < seconds.size(); ++round) {
        longer[round].push_back(longer_than_predicted(
            seconds[round], setting.stages(), setting.microbatches, predicted));
      }
    }
    return longer;
  }

  // What a kind of operator of the first one takes longer behind that place.
  double operator_seconds(size_t place) const {
    const SmallSetting& setting = settings_.front();
    const Configured of = counted(setting);
    const auto work =
        layer_work(of.model, of.strategy, find_stack(of.strategy.stack));
    Layers layers;
    for (const LayerWork& layer : work) layers.push_back(&layer);
    return fit_operator(
        seconds_of(place, 0), setting.stages(), operator_kinds(layers));
  }

 private:
  // By round.
  std::vector<SmallSeconds> seconds_of(size_t place, size_t training) const {
    std::vector<SmallSeconds> list;
    for (const auto& seconds : rounds_) {
      list.push_back(
          {.elsewhere = elsewhere_.seconds(place),
           .step = seconds[at(place, training)],
           .pass = seconds[at(place, training) + 1],
           .plain_pass = seconds[at(0, training) + 1]});
    }
    return list;
  }

  size_t at(size_t place, size_t training) const {
    return 2 * (place * trainings_.size() + training);
  }

  World& world_;
  Elsewhere elsewhere_;
  std::vector<SmallSetting> settings_;
  std::vector<std::unique_ptr<SmallTraining>> trainings_;
  Rounds rounds_;
};

}  // namespace

std::vector<HostWork>
bench_host_work(BenchMeter& meter, World& world, MachineMeasurement measured) {
  const SmallSteps small{
      .ranks = world.size(), .of_data = kOfData, .of_pipeline = kOfPipeline};
  SmallNetworks networks(meter, world);
  const Layout data{.dp_replicate = small.ranks};
  networks.add({data, small.few_layers, kOfData.few});
  networks.add({data, small.few_layers, kOfData.many});
  networks.add({data, small.many_layers, kOfData.few});
  constexpr size_t kData = 3;
  if (small.ranks > 1) {
    for (const int64_t microbatches : {kOfPipeline.few, kOfPipeline.many}) {
      networks.add(
          {{.pp = small.ranks}, small.few_layers * small.ranks, microbatches});
    }
  }
  networks.measure(meter);
  std::vector<HostWork> works;
  for (size_t place = 0; place < kElsewhere.size(); ++place) {
    measured.host_work.clear();
    HostWork work =
        fit_host_work(small, networks.beside(measured, place, 0, kData));
    if (small.ranks > 1) {
      measured.host_work = {work};
      work = with_pipeline_work(
          work, small, networks.beside(measured, place, kData, 2));
    }
    work.operator_seconds = networks.operator_seconds(place);
    work.computing_seconds = networks.computing_seconds(place);
    works.push_back(work);
  }
  return works;
}

}  // namespace echelon
