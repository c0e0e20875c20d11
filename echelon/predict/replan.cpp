// Each layout is estimated by formulas, with the recompute that its memory
// needs. The simulator then runs those that may be the fastest or within 5 % of
// it: formulas do not know which collectives wait for the same link.
#include "echelon/predict/replan.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "echelon/cluster/local_machine.h"
#include "echelon/cost/choices.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/job/resize.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::predict {
namespace {

// A layout that is so much slower than the fastest is as good.
constexpr double kAsFast = 1.05;
// How far formulas and the simulator may be apart, and how many steps are
// simulated at most.
constexpr double kMaySimulateFaster = 1.5;
constexpr size_t kMostSimulated = 24;

constexpr std::array kRecomputeOptions = {
    Recompute::none, Recompute::selective, Recompute::all, Recompute::budget};

struct Candidate {
  Job job;
  Configured what;
  cost::StepEstimate step;
};

bool fits(const Job& job, const cost::StepEstimate& step) {
  return step.fits && (job.memory.limit_bytes == 0 ||
                       step.memory.peak_bytes() <=
                           static_cast<double>(job.memory.limit_bytes));
}

// The job's own recompute, and less or more of it.
std::vector<Recompute> recomputes_of(const Job& job) {
  const Recompute own = job.memory.recompute;
  std::vector<Recompute> list = {own};
  for (const Recompute other :
       {Recompute::none, Recompute::selective, Recompute::all}) {
    const bool less_than_budget =
        own == Recompute::budget && other == Recompute::none;
    if (other != own && !less_than_budget) list.push_back(other);
  }
  return list;
}

// Empty where the cost model has no such layout.
std::optional<Candidate> estimate(
    Job job, const Configure& configure, const cluster::Cluster& cluster,
    std::string& why) {
  try {
    Candidate made{.job = std::move(job), .what = {}, .step = {}};
    made.what = configure(made.job);
    made.what.strategy =
        cost::with_choices(made.what.model, made.what.strategy, cluster);
    made.step =
        cost::estimate_step(made.what.model, made.what.strategy, cluster);
    return made;
  } catch (const ConfigError& error) {
    if (why.empty()) why = error.what();
    return std::nullopt;
  }
}

// The layout with its own recompute where that fits, and with each other one
// that is faster or fits instead.
void add_candidates(
    const Job& job, const Configure& configure, const cluster::Cluster& cluster,
    std::vector<Candidate>& all, std::string& why, bool& priced) {
  double least = 0;
  for (const Recompute recompute : recomputes_of(job)) {
    Job other = job;
    other.memory.recompute = recompute;
    auto made = estimate(std::move(other), configure, cluster, why);
    if (!made) return;
    priced = true;
    const double seconds = made->step.step_seconds;
    if (!fits(made->job, made->step) || (least > 0 && seconds >= least)) {
      continue;
    }
    least = seconds;
    all.push_back(std::move(*made));
    if (recompute == Recompute::none) return;  // nothing is faster
  }
}

Replanned plan_of(const Candidate& candidate) {
  return {
      .layout = candidate.job.layout,
      .recompute = candidate.job.memory.recompute,
      .step_seconds = candidate.step.step_seconds,
      .model_flops_utilisation = candidate.step.model_flops_utilisation,
      .peak_bytes = candidate.step.memory.peak_bytes(),
      .unknown = ""};
}

void simulate(Candidate& candidate, const cluster::Cluster& cluster) {
  candidate.step = simulator::simulate(
                       candidate.what.model, candidate.what.strategy, cluster,
                       {.timeline_ranks = 0})
                       .step;
}

double seconds_of(const Candidate& candidate) {
  return candidate.step.step_seconds;
}

// Leaves those within 5 % of the fastest, in their order.
void keep_fast(std::vector<Candidate>& all, const cluster::Cluster& cluster) {
  double least = std::ranges::min(all, {}, seconds_of).step.step_seconds;
  std::erase_if(all, [&](const Candidate& candidate) {
    return seconds_of(candidate) > kMaySimulateFaster * least;
  });
  if (all.size() > kMostSimulated) {
    std::vector<double> times;
    for (const auto& candidate : all) times.push_back(seconds_of(candidate));
    std::ranges::nth_element(times, times.begin() + kMostSimulated);
    std::erase_if(all, [&](const Candidate& candidate) {
      return seconds_of(candidate) > times[kMostSimulated];
    });
  }
  for (Candidate& candidate : all) simulate(candidate, cluster);
  least = std::ranges::min(all, {}, seconds_of).step.step_seconds;
  std::erase_if(all, [&](const Candidate& candidate) {
    return seconds_of(candidate) > kAsFast * least;
  });
}

Replanned
nearest(const Job& job, const JobFacts& facts, int64_t ranks, std::string why) {
  const Layout layout = ranks == job.layout.num_ranks()
                            ? job.layout
                            : layout_on(job, ranks, facts.data);
  return {
      .layout = layout,
      .recompute = job.memory.recompute,
      .unknown = std::move(why)};
}

// Changes of recompute come after those of layouts. `why`: the cost model has
// none of the layouts; empty: it has some.
std::vector<Candidate> candidates_of(
    const Job& job, const JobFacts& facts, const Configure& configure,
    int64_t num_ranks, const cluster::Cluster& cluster, std::string& why) {
  std::vector<Candidate> all;
  bool priced = false;
  for (const Layout& layout : layouts_on(job, num_ranks, facts.data)) {
    Job other = job;
    other.layout = layout;
    add_candidates(other, configure, cluster, all, why, priced);
  }
  if (priced) why.clear();
  std::ranges::stable_partition(all, [&](const Candidate& candidate) {
    return candidate.job.memory.recompute == job.memory.recompute;
  });
  return all;
}

Recompute recompute_named(const std::string& name) {
  for (const Recompute recompute : kRecomputeOptions) {
    if (to_string(recompute) == name) return recompute;
  }
  throw ConfigError(format("recompute={}: is none", name));
}

constexpr const char* kRecomputeIs = " recompute=";

}  // namespace

RunCluster
cluster_of_hosts(int64_t ranks, int64_t ranks_per_host, bool on_processor) {
  if (ranks <= ranks_per_host) return cluster_of_run(ranks, on_processor);
  RunCluster found = cluster_of_run(ranks_per_host, on_processor);
  if (!found.cluster) return found;
  cluster::NodeGroup& group = found.cluster->groups.front();
  group.node.num_devices = ranks_per_host;
  group.count = (ranks + ranks_per_host - 1) / ranks_per_host;
  // `echelon bench` of one host measures no network.
  if (group.node.network.bytes_per_second == 0) {
    const cluster::LocalMachine machine = cluster::look_at_machine();
    group.node.network = cluster::network_of(machine, ranks_per_host);
  }
  if (group.node.network.bytes_per_second == 0) {
    found = {
        .cluster = std::nullopt,
        .missing =
            "Nothing is predicted: the network between hosts is "
            "not known."};
  }
  return found;
}

Replanned replan(
    const Job& job, const JobFacts& facts, int64_t num_ranks,
    const RunCluster& cluster, const DoesNotFit& check,
    const Configure& given) {
  const Configure by_formulas = [&](const Job& other) {
    return configured(
        cluster.cluster
            ? with_compute_dtype(other, cluster.cluster->node_of(0).device)
            : other,
        facts);
  };
  const Configure& configure = given ? given : by_formulas;
  const auto checked = [&](Replanned plan) {
    if (check && num_ranks != job.layout.num_ranks()) {
      const std::string excess = check(replanned(job, plan));
      if (!excess.empty()) throw ConfigError(excess);
    }
    return plan;
  };
  std::string why = cluster.missing;
  if (!job.model.devices.empty()) {
    why = "Nothing is predicted: [model] devices.";
  }
  if (!cluster.cluster || !why.empty()) {
    return checked(nearest(job, facts, num_ranks, why));
  }
  if (num_ranks == job.layout.num_ranks()) {
    auto own = estimate(job, configure, *cluster.cluster, why);
    if (!own) return nearest(job, facts, num_ranks, why);
    simulate(*own, *cluster.cluster);
    return plan_of(*own);
  }
  std::vector<Candidate> all =
      candidates_of(job, facts, configure, num_ranks, *cluster.cluster, why);
  if (all.empty()) {
    // A layout that check_job() accepts, or its error.
    Replanned plan = nearest(job, facts, num_ranks, why);
    if (!why.empty()) return checked(std::move(plan));
    why = format("no layout of {} fits the memory", counted(num_ranks, "rank"));
    if (!check) throw ConfigError(why);
    // The closer look decides.
    plan.unknown = "Nothing is predicted: by formulas " + why + ".";
    return checked(std::move(plan));
  }
  std::string excess;
  while (!all.empty()) {
    std::vector<Candidate> fast = all;
    keep_fast(fast, *cluster.cluster);
    for (const Candidate& candidate : fast) {
      const std::string found = check ? check(candidate.job) : "";
      if (found.empty()) return plan_of(candidate);
      if (excess.empty()) excess = found;
    }
    std::erase_if(all, [&](const Candidate& candidate) {
      return std::ranges::any_of(fast, [&](const Candidate& other) {
        return candidate.job.layout == other.job.layout &&
               candidate.job.memory.recompute == other.job.memory.recompute;
      });
    });
  }
  throw ConfigError(excess);
}

Job replanned(Job job, const Replanned& plan) {
  job.layout = plan.layout;
  job.memory.recompute = plan.recompute;
  return job;
}

std::string to_text(const Job& job, const Replanned& plan) {
  std::string text = to_string(plan.layout);
  if (plan.recompute != job.memory.recompute) {
    text += kRecomputeIs + to_string(plan.recompute);
  }
  return text;
}

Job replanned(Job job, const std::string& text) {
  const size_t at = text.find(kRecomputeIs);
  job.layout = parse_layout(text.substr(0, at));
  if (at != std::string::npos) {
    job.memory.recompute =
        recompute_named(text.substr(at + std::string(kRecomputeIs).size()));
  }
  return job;
}

}  // namespace echelon::predict
