// A plan's request, and a search as a plan would ask for it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/planner/device_sizes.h"
#include "echelon/planner/plan.h"
#include "echelon/planner/search_space.h"

namespace echelon::planner {

/// A request for a model of the catalogue.
inline PlanRequest plan_request(
    const std::string& model, const std::string& cluster, int64_t batch,
    std::vector<std::pair<std::string, std::string>> fixed = {}) {
  PlanRequest request;
  request.model = cost::find_model(model);
  request.cluster = cluster::find_cluster(cluster);
  request.global_batch = batch;
  request.fixed = std::move(fixed);
  return request;
}

/// A search for a model of the catalogue, on all devices of `cluster`.
inline SearchJob search_job(
    const std::string& model, const cluster::Cluster& cluster, int64_t batch,
    const std::string& framework = "echelon") {
  SearchJob job;
  job.model = cost::find_model(model);
  job.cluster = cluster;
  job.devices = cluster.num_devices();
  job.global_batch = batch;
  job.seq_len = job.model.seq_len;
  job.framework = framework;
  job.precision = usual_precision(cluster);
  job.speeds = device_speeds(
      job.model, job.cluster, job.seq_len, job.precision, job.framework);
  return job;
}

inline SearchJob search_job(
    const std::string& model, const std::string& cluster, int64_t batch,
    const std::string& framework = "echelon") {
  return search_job(model, cluster::find_cluster(cluster), batch, framework);
}

/// A strategy of that job with `batch` samples, or 8 for each data-parallel
/// rank.
inline cost::Strategy
strategy_of(const SearchJob& job, const Layout& layout, int64_t batch = 0) {
  cost::Strategy strategy;
  strategy.layout = layout;
  strategy.global_batch = batch > 0 ? batch : 8 * layout.data_degree();
  strategy.seq_len = job.seq_len;
  strategy.framework = job.framework;
  return strategy;
}

}  // namespace echelon::planner
