// How a job goes on with another number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "echelon/job/check_job.h"
#include "echelon/predict/configured.h"
#include "echelon/predict/predict_run.h"

namespace echelon::predict {

/// The cluster of a job with so many ranks, `ranks_per_host` on each of its
/// hosts, which are like this one; cluster_of_run() of one host. Also missing
/// where the network between hosts is not known.
RunCluster
cluster_of_hosts(int64_t ranks, int64_t ranks_per_host, bool on_processor);

struct Replanned {
  Layout layout;
  Recompute recompute = Recompute::none;
  double step_seconds = 0;             // predicted; 0: not known
  double model_flops_utilisation = 0;  // the same
  double peak_bytes = 0;               // of the fullest rank; 0: not known
  std::string unknown;  // why there is no prediction; empty: there is one
};

/// Why a job does not fit its memory; empty when it does.
using DoesNotFit = std::function<std::string(const Job&)>;

/// A job in the terms of the cost model; throws ConfigError as configured().
using Configure = std::function<Configured(const Job&)>;

/// The layout and the recompute with which `job` goes on with `num_ranks`.
/// Global batch, order of samples and learning rate are the job's.
///
/// Of all layouts of dp, fsdp, tp and pp whose memory fits, with as little
/// recompute as that needs, it is the one that changes least among those whose
/// predicted step is within 5 % of the fastest. For the job's own number of
/// ranks it is the job's own. Where steps cannot be predicted, it is
/// layout_on().
///
///   facts  of check_job() for the job
///   check  a closer look at the memory, at the layouts in question; may be
///          null
///   configure  what a step of a layout costs; null: configured(), by formulas
///
/// Throws ConfigError when nothing fits, as layout_on() does.
Replanned replan(
    const Job& job, const JobFacts& facts, int64_t num_ranks,
    const RunCluster& cluster, const DoesNotFit& check = {},
    const Configure& configure = {});

/// The job in that layout.
Job replanned(Job job, const Replanned& plan);

/// "fsdp=2,tp=2", or "fsdp=2,tp=2 recompute=all" where that is not the job's.
std::string to_text(const Job& job, const Replanned& plan);
/// The job as such a text has it.
Job replanned(Job job, const std::string& text);

}  // namespace echelon::predict
