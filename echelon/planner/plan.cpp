// A plan takes one search for each number of devices that the objective allows:
// all of them for the shortest time, fractions of a node and then nodes for the
// least cost or the fewest devices. The plans kept are ranked, simulated if
// asked, and compared with what a textbook would choose. When nothing fits,
// doubling and then bisecting the nodes finds the smallest cluster that
// suffices.
#include "echelon/planner/plan.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/planner/device_sizes.h"
#include "echelon/planner/reasons.h"
#include "echelon/planner/search.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::planner {
namespace {

constexpr double kSecondsPerHour = 3600;
constexpr int64_t kMostDevices = 1 << 17;  // that a smallest cluster may have

double
step_price(const cluster::Cluster& cluster, int64_t devices, double seconds) {
  double price = 0;  // of an hour
  int64_t left = devices;
  for (const auto& group : cluster.groups) {
    const int64_t here = std::min(left, group.count * group.node.num_devices);
    price += static_cast<double>(here) * group.node.device.price_per_hour;
    left -= here;
  }
  return price * seconds / kSecondsPerHour;
}

Plan plan_of(const Candidate& candidate, const cluster::Cluster& cluster) {
  const int64_t devices = candidate.strategy.layout.num_ranks();
  return {
      .strategy = candidate.strategy,
      .step = candidate.step,
      .cost_per_step =
          step_price(cluster, devices, candidate.step.step_seconds),
      .devices = devices};
}

SearchJob
job_of(const PlanRequest& request, int64_t devices, bool simulate = false) {
  return {
      .model = request.model,
      .cluster = request.cluster,
      .devices = devices,
      .global_batch = request.global_batch,
      .seq_len = request.seq_len > 0 ? request.seq_len : request.model.seq_len,
      .precision = request.precision,
      .framework = request.framework,
      .constraints = Constraints(request.fixed),
      .speeds = device_speeds(
          request.model, request.cluster, request.seq_len, request.precision,
          request.framework),
      .coarse = request.coarse,
      .simulate = simulate};
}

// Numbers of devices that a job may take, ascending: fractions of a node, then
// nodes.
std::vector<int64_t> device_counts(const cluster::Cluster& cluster) {
  const int64_t all = cluster.num_devices();
  const int64_t node = cluster.groups.front().node.num_devices;
  std::vector<int64_t> counts;
  for (const int64_t part : divisors(node)) {
    if (part < node && part < all) counts.push_back(part);
  }
  // All numbers of nodes up to 16, then steps of an eighth.
  for (int64_t nodes = 1; nodes * node < all;
       nodes += std::max<int64_t>(1, nodes / 8)) {
    counts.push_back(nodes * node);
  }
  counts.push_back(all);
  return counts;
}

std::vector<int64_t> asked_counts(const PlanRequest& request) {
  const Constraints constraints(request.fixed);
  std::vector<int64_t> counts = request.objective == Objective::time
                                    ? std::vector{request.cluster.num_devices()}
                                    : device_counts(request.cluster);
  if (!constraints.says("devices")) return counts;
  for (const auto& [key, value] : request.fixed) {
    if (key == "devices") counts = {std::stoll(value)};
  }
  if (counts[0] > request.cluster.num_devices()) {
    throw ConfigError(format(
        "--fix devices={}: {} has {}", counts[0], request.cluster.name,
        request.cluster.num_devices()));
  }
  return counts;
}

void count(const SearchResult& found, PlanResult& result) {
  result.considered += found.considered;
  result.pruned += found.pruned_memory;
  result.pruned_slow += found.pruned_time;
  result.estimated += found.estimated;
  result.simulated += found.simulated;
}

// The cost where prices are known, else the devices' time.
double cost_of(const Plan& plan) {
  return plan.cost_per_step > 0
             ? plan.cost_per_step
             : static_cast<double>(plan.devices) * plan.step.step_seconds;
}

void rank(std::vector<Plan>& plans, Objective objective) {
  std::ranges::stable_sort(plans, [&](const Plan& a, const Plan& b) {
    if (objective == Objective::cost) return cost_of(a) < cost_of(b);
    if (objective == Objective::devices && a.devices != b.devices) {
      return a.devices < b.devices;
    }
    return a.step.step_seconds < b.step.step_seconds;
  });
}

void search_all(const PlanRequest& request, PlanResult& result) {
  for (const int64_t devices : asked_counts(request)) {
    // Costs are compared over many numbers of devices, by formulas first.
    const SearchJob job = job_of(
        request, devices,
        request.simulate && request.objective != Objective::cost);
    const SearchResult found = search(job, request.keep);
    count(found, result);
    for (const auto& candidate : found.best) {
      result.plans.push_back(plan_of(candidate, request.cluster));
    }
    if (found.closest) {
      result.closest = plan_of(*found.closest, request.cluster);
    }
    if (request.objective == Objective::devices && !found.best.empty()) break;
  }
  rank(result.plans, request.objective);
  if (static_cast<int64_t>(result.plans.size()) > request.keep) {
    result.plans.resize(static_cast<size_t>(request.keep));
  }
  if (!result.plans.empty()) result.closest.reset();
}

// The cluster, with more nodes of the last kind where it has too few devices.
cluster::Cluster resized(const cluster::Cluster& cluster, int64_t devices) {
  const int64_t missing = devices - cluster.num_devices();
  if (missing <= 0) return cluster;
  cluster::Cluster larger = cluster;
  auto& last = larger.groups.back();
  last.count += (missing + last.node.num_devices - 1) / last.node.num_devices;
  return larger;
}

std::optional<Plan> best_on(const PlanRequest& request, int64_t devices) {
  const auto plans = plans_on(request, devices, 1);
  return plans.empty() ? std::nullopt : std::optional(plans.front());
}

// Doubles the nodes until a plan fits, then bisects for the smallest number.
std::optional<Plan> find_smallest(PlanRequest request) {
  const int64_t node = request.cluster.groups.back().node.num_devices;
  int64_t low = asked_counts(request).back();  // does not fit
  std::erase_if(request.fixed, [](const auto& fixed) {
    return fixed.first == "devices";
  });
  std::optional<Plan> fits;
  int64_t high = (low + node - 1) / node * node;
  if (high > low) fits = best_on(request, high);
  while (!fits && high < kMostDevices) {
    low = high;
    high *= 2;
    fits = best_on(request, high);
  }
  if (!fits) return {};
  while (high - low > node) {
    const int64_t middle = (low + high) / 2 / node * node;
    if (middle <= low) break;
    const auto plan = best_on(request, middle);
    (plan ? high : low) = middle;
    if (plan) fits = plan;
  }
  return fits;
}

Plan simulated_plan(const SearchJob& job, Candidate candidate) {
  simulate_step(job, candidate);
  return plan_of(candidate, job.cluster);
}

// Searches one textbook choice: `fixed` in addition to what is asked.
void compare_with(
    const PlanRequest& request, const std::string& name,
    const std::vector<std::pair<std::string, std::string>>& fixed,
    PlanResult& result) {
  PlanRequest other = request;
  other.fixed.insert(other.fixed.end(), fixed.begin(), fixed.end());
  const Plan& best = result.plans.front();
  Rejected rejected{.name = name, .because = {}, .plan = {}};
  try {
    const SearchJob job = job_of(other, best.devices);
    if (job.constraints.allow(best.strategy)) return;  // it is the best
    const auto found = search(job, 1);
    if (!found.best.empty()) {
      rejected.plan = request.simulate
                          ? simulated_plan(job, found.best.front())
                          : plan_of(found.best.front(), request.cluster);
      rejected.because = explain_slower(*rejected.plan, best);
    } else if (found.closest) {
      rejected.plan = plan_of(*found.closest, request.cluster);
      rejected.because = explain_unfit(request, *rejected.plan);
    } else {
      rejected.because = why_none(job);
    }
  } catch (const ConfigError&) {
    return;  // what is asked rules it out already
  }
  result.others.push_back(rejected);
}

void compare_with_textbook(const PlanRequest& request, PlanResult& result) {
  const Plan& best = result.plans.front();
  if (result.plans.size() > 1 && result.plans[1].devices == best.devices) {
    result.others.push_back(
        {"the runner-up, " + to_string(result.plans[1].strategy.layout),
         explain_slower(result.plans[1], best), result.plans[1]});
  }
  const std::string all = std::to_string(best.devices);
  if (best.devices == 1) return;
  compare_with(request, "pure data parallelism", {{"dp", all}}, result);
  compare_with(
      request, "pure sharded data parallelism", {{"fsdp", all}, {"stage", "3"}},
      result);
  const int64_t node = request.cluster.groups.front().node.num_devices;
  if (best.devices > node && node > 1) {
    compare_with(
        request, "tensor parallelism across nodes",
        {{"tp", std::to_string(2 * node)}}, result);
  }
  if (best.strategy.layout.pp > 1) {
    compare_with(request, "no pipeline", {{"pp", "1"}}, result);
  }
}

std::string precisions_of(const cluster::Device& device) {
  std::string text;
  for (const cluster::Precision precision : cluster::kPrecisions) {
    if (device.peak(precision) <= 0) continue;
    text +=
        (text.empty() ? "" : ", ") + std::string(cluster::to_string(precision));
  }
  return text;
}

void check_request(const PlanRequest& request) {
  cost::check(request.model);
  cluster::check(request.cluster);
  if (request.global_batch < 1) {
    throw ConfigError(format(
        "--batch {}: must be at least 1, the samples of one step",
        request.global_batch));
  }
  if (request.framework == "echelon" &&
      request.precision == cluster::Precision::fp4) {
    throw ConfigError(
        "--precision fp4: echelon train computes in bf16, fp16, fp8, tf32, "
        "fp32 or fp64; take one of these, or another --stack");
  }
  if (request.framework == "echelon" &&
      request.precision == cluster::Precision::fp8 &&
      !request.model.transformer) {
    throw ConfigError(
        "--precision fp8: is for the linear layers of language models; take "
        "bf16, or another --stack");
  }
  for (const auto& group : request.cluster.groups) {
    const cluster::Device& device = group.node.device;
    if (device.peak(request.precision) > 0) continue;
    throw ConfigError(format(
        "--precision {}: {} does not compute in it; it does in {}",
        cluster::to_string(request.precision), device.name,
        precisions_of(device)));
  }
  if (request.keep < 1) throw ConfigError("at least 1 plan must be kept");
}

std::string bound_text(const PlanRequest& request) {
  return format(
      "A strategy is left out when weights, gradients and optimizer state of "
      "its fullest rank alone exceed the {} that a job may use of a device, or "
      "when its slowest rank, with what the pipeline must do before and after "
      "it, computes longer than the plans that were found take.",
      format_bytes(usable_device_bytes(request.cluster)));
}

// The best plan for one value of a setting; `because` is set where none fits.
Alternative alternative(
    const PlanRequest& request, const SearchJob& job,
    const std::string& value) {
  Alternative row{.value = value, .plan = {}, .because = {}};
  const SearchResult found = search(job, request.keep);
  if (!found.best.empty()) {
    row.plan = plan_of(found.best.front(), request.cluster);
  } else if (found.closest) {
    row.plan = plan_of(*found.closest, request.cluster);
    row.because = explain_unfit(request, *row.plan);
  } else {
    row.because = why_none(job);
  }
  return row;
}

}  // namespace

cluster::Cluster with_free_memory(cluster::Cluster cluster, double free_share) {
  for (auto& group : cluster.groups) {
    group.node.device.memory_bytes *= 1 - free_share;
  }
  return cluster;
}

cluster::Precision usual_precision(const cluster::Cluster& cluster) {
  for (const cluster::Precision precision :
       {cluster::Precision::bf16, cluster::Precision::fp16}) {
    const bool all = std::ranges::all_of(
        cluster.groups, [&](const cluster::NodeGroup& group) {
          return group.node.device.peak(precision) > 0;
        });
    if (all) return precision;
  }
  return cluster::Precision::fp32;
}

PlanResult plan(const PlanRequest& request) {
  check_request(request);
  PlanResult result;
  result.bound = bound_text(request);
  search_all(request, result);
  if (result.plans.empty() && !result.closest) {
    throw ConfigError(
        explain_impossible(job_of(request, asked_counts(request).back())));
  }
  if (result.plans.empty()) {
    result.smallest = find_smallest(request);
    result.reason =
        explain_nothing_fits(request, *result.closest, result.smallest);
    return result;
  }
  if (request.simulate && request.objective == Objective::cost) {
    for (Plan& plan : result.plans) {
      plan = simulated_plan(
          job_of(request, plan.devices), {plan.strategy, plan.step});
    }
    rank(result.plans, request.objective);
  }
  result.reason = explain_best(request, result.plans.front());
  if (request.compare) compare_with_textbook(request, result);
  return result;
}

std::vector<Plan>
plans_on(const PlanRequest& request, int64_t devices, int64_t keep) {
  PlanRequest other = request;
  other.cluster = resized(request.cluster, devices);
  std::vector<Plan> plans;
  for (const auto& candidate : search(job_of(other, devices), keep).best) {
    plans.push_back(plan_of(candidate, other.cluster));
  }
  return plans;
}

std::vector<Alternative>
explain_key(const PlanRequest& request, const std::string& key) {
  check_request(request);
  const SearchKey& setting = find_search_key(key);
  PlanRequest open = request;
  std::erase_if(
      open.fixed, [&](const auto& fixed) { return fixed.first == key; });
  open.compare = false;
  const PlanResult free = plan(open);
  const int64_t devices = free.plans.empty() ? request.cluster.num_devices()
                                             : free.plans[0].devices;
  const SearchJob job = job_of(open, devices, open.simulate);
  std::vector<Alternative> rows;
  const Plan* best = nullptr;
  const std::vector<int64_t> values = values_of(job, setting);
  // `best` points into the rows, which must stay where they are.
  rows.reserve(values.size());
  for (const int64_t value : values) {
    SearchJob one = job;
    auto fixed = open.fixed;
    fixed.emplace_back(key, setting.text_of(value));
    one.constraints = Constraints(fixed);
    rows.push_back(alternative(open, one, setting.text_of(value)));
    const Alternative& row = rows.back();
    if (!row.because.empty()) continue;  // it does not fit
    if (!best || row.plan->step.step_seconds < best->step.step_seconds) {
      best = &*row.plan;
    }
  }
  for (Alternative& row : rows) {
    if (!row.because.empty()) continue;
    row.because =
        &*row.plan == best ? "the best" : explain_slower(*row.plan, *best);
  }
  return rows;
}

}  // namespace echelon::planner
