#include "echelon/train/bench_host_work.h"

#include <torch/torch.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/local_machine.h"
#include "echelon/data/loader.h"
#include "echelon/explain/counted_layers.h"
#include "echelon/explain/predict_run.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/train/bench_passes.h"
#include "echelon/train/objective.h"
#include "echelon/models/layer_list.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/bench_fits.h"
#include "echelon/train/counted_shape.h"
#include "echelon/train/step.h"
#include "echelon/train/step_sums.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSteps = 10;
constexpr int64_t kRounds = 25;
constexpr Microbatches kOfData = {1, 5};
constexpr Microbatches kOfPipeline = {4, 16};
// Of passes that the small networks' stages begin with; of none.
constexpr std::array<int64_t, 3> kSamplesElsewhere = {0, 1, 4};
constexpr double kLongerElsewhere = 1.25;  // than such a pass takes

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Computes something else for a while, always as long: behind it caches and branch
// predictors know the trainer's code as little as behind a larger network's layers.
class Elsewhere {
 public:
  explicit Elsewhere(BenchMeter& meter) {
    for (const int64_t samples : kSamplesElsewhere) {
      Place place;
      if (samples > 0) {
        place.pass = convolutions_pass(samples);
        place.seconds = kLongerElsewhere * meter.seconds_of(place.pass);
      }
      places_.push_back(std::move(place));
    }
  }

  void choose(size_t place) { chosen_ = place; }
  double seconds(size_t place) const { return places_[place].seconds; }
  void spend() const {
    const auto begin = Clock::now();
    const Place& place = places_[chosen_];
    if (place.pass) place.pass();
    while (seconds_since(begin) < place.seconds) {
    }
  }

 private:
  struct Place {
    std::function<void()> pass;
    double seconds = 0;
  };
  std::vector<Place> places_;
  size_t chosen_ = 0;
};

// How a small network is trained: a sample for each microbatch of each rank.
struct Small {
  Layout layout;
  int64_t layers = 1;
  int64_t microbatches = 1;

  int64_t stages() const { return layout.pp; }
  bool begins_stage(int64_t layer) const { return layer % (layers / stages()) == 0; }
};

Job job_of(const Small& small) {
  Job job;
  job.model.name = "mlp";
  job.model.hidden.assign(static_cast<size_t>(small.layers - 1), 16);
  job.data.name = "dummy";
  job.data.samples = 4096;
  job.data.holdout = 0;
  job.data.shape = {1, 4, 4};
  job.data.classes = 2;
  job.optimizer.name = "adamw";
  job.layout = small.layout;
  if (small.stages() > 1) {
    job.pipeline.microbatches = small.microbatches;
  } else {
    job.train.accumulate = small.microbatches;
  }
  job.train.batch = small.layout.data_degree() * small.microbatches;
  job.train.steps = 1;
  return job;
}

// What is predicted of it, and of the operators of its layers alone.
class SmallPrediction {
 public:
  explicit SmallPrediction(const Small& small) : small_(small) {}

  double step_seconds(const MachineMeasurement& measured) const {
    return predict_step(counted(small_), cluster(measured)).step_seconds;
  }
  // Of a step, and waiting for those of other stages.
  double computing_seconds(const MachineMeasurement& measured) const {
    return computing(small_, measured);
  }
  // The same of a single pass through all layers.
  double pass_seconds(const MachineMeasurement& measured) const {
    return computing({.layers = small_.layers}, measured);
  }

 private:
  static Configured counted(const Small& small) {
    const Job job = job_of(small);
    const TrainingData data = open_data(job.data, 0);
    const ModelSource source = model_source(job, data.train->spec());
    return configured_as_counted(counted_shape(job, source), job, job);
  }
  static Cluster cluster(const MachineMeasurement& measured) {
    return cluster_of(measured, look_at_machine());
  }
  static double computing(const Small& small, MachineMeasurement measured) {
    measured.host_work.clear();
    const Configured what = counted(small);
    const StepParts parts =
        estimate_time(what.model, what.strategy, cluster(measured)).parts;
    return parts.matrix + parts.memory + parts.bubble;
  }

  const Small small_;
};

// As the training loop has it, without a run's folder. Each stage begins elsewhere.
class SmallTraining {
 public:
  SmallTraining(const Small& small, const Elsewhere& elsewhere, World& world)
      : job_(with_cuts(small)),
        world_(world),
        data_(open_data(job_.data, 0)),
        groups_(world, job_.layout),
        source_(model_source(
            job_, whole_layers(layers_of(small, elsewhere, data_.train->spec())),
            data_.train->spec())),
        objective_(objective_for(source_.sample, source_.classes, {})),
        state_(job_, {source_, world, groups_}, 1),
        loader_(*data_.train, training_batches(job_, data_, groups_)) {
    for (const auto& layer : source_.layers.layers()) built_.push_back(layer.build());
    if (world.rank() == 0) {
      metrics_ = std::make_unique<MetricsWriter>("/dev/null");
    }
  }

  // Seconds of a step.
  double step() {
    const auto begin = Clock::now();
    const Score score =
        state_.model().forward_backward(next_batch(), counts_units(*data_.train));
    const StepSums sums = share_sums({.score = score}, world_);
    state_.update(0, /*measure_norm=*/false, nullptr);
    const auto seconds = seconds_since(begin);
    if (metrics_) {
      metrics_->append(StepMetrics{.loss = sums.loss_sum, .step_seconds = seconds});
    }
    return seconds_since(begin);
  }

  // Seconds of forwards and backwards of one sample through all layers by themselves.
  double pass() {
    const Batch batch = piece_of(next_batch(), 0, 1);
    const auto begin = Clock::now();
    Tensors values = {batch.inputs};
    for (const auto& layer : built_) values = layer.forward(values);
    (objective_->loss_sum(values, batch.targets) * 0.5).backward();
    const double seconds = seconds_since(begin);
    for (const auto& layer : built_) {
      if (layer.module) layer.module->zero_grad();
    }
    return seconds;
  }

 private:
  static std::string place(int64_t layer) {
    return "elsewhere" + std::to_string(layer);
  }
  static Job with_cuts(const Small& small) {
    Job job = job_of(small);
    for (int64_t layer = 1; layer < small.layers; ++layer) {
      if (small.begins_stage(layer)) job.model.cut.push_back(place(layer));
    }
    return job;
  }
  static LayerList layers_of(
      const Small& small, const Elsewhere& elsewhere, const SampleSpec& sample) {
    const LayerList plain = model_source(job_of(small), sample).layers;
    LayerList layers;
    for (int64_t layer = 0; layer < small.layers; ++layer) {
      if (small.begins_stage(layer)) {
        layers.add_function(place(layer), [&elsewhere](const torch::Tensor& values) {
          if (!values.is_meta()) elsewhere.spend();  // shapes are asked for as well
          return values;
        });
      }
      layers.add_definition(plain[static_cast<size_t>(layer)]);
    }
    return layers;
  }
  Batch next_batch() {
    auto batch = loader_.next();
    if (!batch) {
      loader_.start_epoch(++epoch_);
      batch = loader_.next();
    }
    return *std::move(batch);
  }

  const Job job_;
  World& world_;
  const TrainingData data_;
  MeshGroups groups_;
  ModelSource source_;
  std::unique_ptr<Objective> objective_;
  std::vector<BuiltLayer> built_;
  TrainingState state_;
  Loader loader_;
  std::unique_ptr<MetricsWriter> metrics_;
  int64_t epoch_ = 0;
};

using Rounds = std::vector<std::vector<double>>;

// The steps and the passes of some networks, timed, and how long their steps are.
class SmallNetworks {
 public:
  SmallNetworks(BenchMeter& meter, World& world) : world_(world), elsewhere_(meter) {}

  void add(const Small& small) {
    small_.push_back(small);
    trainings_.push_back(std::make_unique<SmallTraining>(small, elsewhere_, world_));
  }

  void measure(BenchMeter& meter) {
    std::vector<std::function<double()>> calls;
    for (size_t place = 0; place < kSamplesElsewhere.size(); ++place) {
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
    rounds_ = meter.rounds_of_own_seconds(calls, kSteps, kRounds);
  }

  // What a rank of the first one computes of a microbatch, elsewhere as well.
  double computing_seconds(size_t place) const {
    std::vector<double> seconds;
    for (const auto& round : rounds_) seconds.push_back(round[at(place, 0) + 1]);
    return median(std::move(seconds));
  }

  // By which the steps of `count` networks from `first` on are longer than what is
  // predicted and than their layers are by themselves behind that place, by round.
  Rounds beside(
      const MachineMeasurement& measured, size_t place, size_t first,
      size_t count) const {
    Rounds longer(rounds_.size());
    const double elsewhere = elsewhere_.seconds(place);
    for (size_t i = first; i < first + count; ++i) {
      const Small& small = small_[i];
      const SmallPrediction predicted(small);
      const double step = predicted.step_seconds(measured);
      // How often the layers' time is the step's.
      const double passes =
          predicted.computing_seconds(measured) / predicted.pass_seconds(measured);
      // The first stage's microbatches, and what the last one waits before its own.
      const auto stages = static_cast<double>(small.stages());
      const auto spent = static_cast<double>(small.microbatches) + stages - 1;
      for (size_t round = 0; round < rounds_.size(); ++round) {
        const auto& seconds = rounds_[round];
        const double slower = seconds[at(place, i) + 1] - stages * elsewhere -
            seconds[at(0, i) + 1];
        longer[round].push_back(
            seconds[at(place, i)] - spent * elsewhere - passes * slower - step);
      }
    }
    return longer;
  }

 private:
  size_t at(size_t place, size_t training) const {
    return 2 * (place * trainings_.size() + training);
  }

  World& world_;
  Elsewhere elsewhere_;
  std::vector<Small> small_;
  std::vector<std::unique_ptr<SmallTraining>> trainings_;
  Rounds rounds_;
};

}  // namespace

std::vector<HostWork> bench_host_work(
    BenchMeter& meter, World& world, MachineMeasurement measured) {
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
  for (size_t place = 0; place < kSamplesElsewhere.size(); ++place) {
    measured.host_work.clear();
    HostWork work =
        fit_host_work(small, networks.beside(measured, place, 0, kData));
    if (small.ranks > 1) {
      measured.host_work = {work};
      work = with_pipeline_work(
          work, small, networks.beside(measured, place, kData, 2));
    }
    work.computing_seconds = networks.computing_seconds(place);
    works.push_back(work);
  }
  return works;
}

}  // namespace echelon
