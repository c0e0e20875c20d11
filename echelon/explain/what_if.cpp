// Simulates a run with other settings (findings.h).
#include <chrono>
#include <utility>

#include "echelon/cluster/local_cluster.h"
#include "echelon/cost/choices.h"
#include "echelon/cost/strategy.h"
#include "echelon/error.h"
#include "echelon/explain/findings.h"
#include "echelon/job/check_job.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/predict/predict_run.h"

namespace echelon::explain {
namespace {

// Simulating a step takes time in proportion to its passes.
double passes_of(const cost::Strategy& strategy) {
  return static_cast<double>(
      strategy.num_microbatches() * cost::num_stages(strategy));
}

// The data of a simulated model: more samples than any batch takes.
std::optional<DataFacts> imagined_data(const RunRecord& run) {
  const DataOptions& data = run.job->data;
  if (!run.simulated || data.name != DataKind::text) return {};
  if (!data.path.empty() || !data.sources.empty()) return {};
  DataFacts facts;
  facts.num_samples = facts.num_train = int64_t{1} << 50;
  facts.sample_shape = {data.sequence};
  facts.classes = 1;  // the model says its vocabulary
  return facts;
}

}  // namespace

WhatIf::WhatIf(
    const RunRecord& run, const std::optional<cluster::Cluster>& cluster,
    double seconds)
    : run_(run), seconds_(seconds) {
  if (!run.job) {
    why_ = "there is no configuration to simulate";
    return;
  }
  try {
    data_ = imagined_data(run);
    if (!data_) data_ = check_job(*run.job, run.job->layout.num_ranks()).data;
    if (cluster) {
      cluster_ = *cluster;
    } else if (run.cluster) {
      cluster_ = *run.cluster;
    } else {
      find_cluster_of(run);
    }
    base_ = simulated({});
    seconds_of_pass_ =
        std::exchange(spent_, 0) / passes_of(base_->configured.strategy);
  } catch (const Error& error) {
    const std::string text = error.what();
    why_ = text.substr(0, text.find('\n'));
  }
}

void WhatIf::find_cluster_of(const RunRecord& run) {
  const int64_t ranks = run.job->layout.num_ranks();
  cluster::LocalCluster here =
      cluster::local_cluster(ranks, predict::ran_on_processor(run.timeline));
  cluster_ = std::move(here.cluster);
  guessed_ = here.rates == cluster::RatesFrom::guess;
}

WhatIfStep WhatIf::simulated(const Settings& settings) const {
  const auto here = [this](const Job& job) {
    return with_compute_dtype(job, cluster_.node_of(0).device);
  };
  const Job job = here(load_job(run_.configuration, {.set = settings}));
  const JobFacts facts = check_job(job, job.layout.num_ranks(), *data_);
  WhatIfStep made{
      .settings = settings,
      .configured = run_.layers ? predict::configured_as_counted(
                                      *run_.layers, here(*run_.job), job)
                                : predict::configured(job, facts)};
  made.configured.model.expert_load = cost::measured_load(run_.steps);
  cost::Strategy& strategy = made.configured.strategy;
  strategy = cost::with_choices(made.configured.model, strategy, cluster_);
  if (base_ && !has_time_for(made.configured.strategy)) {
    ++left_out_;
    throw ConfigError("it would take too long to simulate");
  }
  simulator::SimulationOptions options;
  options.timeline_ranks = 0;
  const auto begin = std::chrono::steady_clock::now();
  made.step =
      simulator::simulate(
          made.configured.model, made.configured.strategy, cluster_, options)
          .step;
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  spent_ += took.count();
  made.seconds_per_sample =
      made.step.step_seconds / static_cast<double>(job.train.batch);
  return made;
}

bool WhatIf::has_time_for(const cost::Strategy& strategy) const {
  return spent_ + seconds_of_pass_ * passes_of(strategy) <= seconds_;
}

std::string WhatIf::none_found(const std::string& why) const {
  if (left_out_ == 0) return why;
  return "None of the settings that there was time to simulate is one.";
}

std::optional<WhatIfStep> WhatIf::with(const Settings& settings) const {
  if (!base_) return {};
  try {
    return simulated(settings);
  } catch (const Error&) {
    return {};  // contradictory settings are no fix
  }
}

double WhatIf::gain(const WhatIfStep& other) const {
  return 1 - other.seconds_per_sample / base_->seconds_per_sample;
}

std::optional<WhatIfStep>
WhatIf::best_of(const std::vector<Settings>& all, double least) const {
  std::optional<WhatIfStep> best;
  for (const Settings& settings : all) {
    auto other = with(settings);
    if (!other || !other->step.fits || gain(*other) < least) continue;
    if (!best || other->seconds_per_sample < best->seconds_per_sample) {
      best = std::move(other);
    }
  }
  return best;
}

}  // namespace echelon::explain
