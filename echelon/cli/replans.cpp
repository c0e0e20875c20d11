// The launcher of a job must answer other hosts within seconds, and a plan may
// count the layers of a large model. So a process of its own makes the plans:
// `echelon plan CONFIG --elastic LOW:HIGH --json`, whose output a user can see
// too.
#include "echelon/cli/replans.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "echelon/cli/count.h"
#include "echelon/cli/job_memory.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

predict::RunCluster cluster_of(
    const Job& job, int64_t num_ranks, int64_t per_host,
    const cluster::Cluster* cluster) {
  if (cluster != nullptr) return {.cluster = *cluster, .missing = ""};
  return predict::cluster_of_hosts(
      num_ranks, per_host > 0 ? per_host : num_ranks,
      job.comm.device == DeviceKind::cpu);
}

// Layers that no formula knows, for each number of ranks that compute a layer
// together; or why they cannot be counted.
struct Counted {
  std::optional<cost::ModelShape> model;
  std::string why;
};
using CountedLayers = std::map<int64_t, Counted>;

const Counted&
counted_for(const Job& job, const cluster::Device& device, CountedLayers& all) {
  const auto [at, is_new] = all.try_emplace(job.layout.tp);
  Counted& counted = at->second;
  if (!is_new) return counted;
  Job together = job;
  together.layout = Layout{.tp = job.layout.tp};
  together.train.rank_batch.clear();
  try {
    counted.model =
        count_layers(with_compute_dtype(together, device), device.processor);
    for (auto& layer : counted.model->layers) layer.stage = -1;
  } catch (const ConfigError& error) {
    counted.why = error.what();
  }
  return counted;
}

// Empty where formulas know the layers.
predict::Configure counting_of(
    const Job& job, const predict::RunCluster& cluster, CountedLayers& all) {
  if (!is_counted_alone(job) || !cluster.cluster) return {};
  const cluster::Device& device = cluster.cluster->node_of(0).device;
  return [&all, &device](const Job& other) {
    const Counted& counted = counted_for(other, device, all);
    if (!counted.model) throw ConfigError(counted.why);
    return predict::Configured{
        .model = *counted.model,
        .strategy =
            predict::configured_strategy(with_compute_dtype(other, device))};
  };
}

predict::Replanned replan_for(
    const Job& job, const JobFacts& facts, int64_t num_ranks, int64_t per_host,
    CountedLayers& counted, const cluster::Cluster* given = nullptr) {
  predict::DoesNotFit check;
  if (given == nullptr) {
    check = [&](const Job& other) { return memory_excess(other, facts); };
  }
  const auto cluster = cluster_of(job, num_ranks, per_host, given);
  return predict::replan(
      job, facts, num_ranks, cluster, check,
      counting_of(job, cluster, counted));
}

Json to_json(const Job& job, int64_t ranks, const predict::Replanned& plan) {
  return {
      {"ranks", ranks},
      {"text", predict::to_text(job, plan)},
      {"layout", to_string(plan.layout)},
      {"recompute", to_string(plan.recompute)},
      {"step_seconds", plan.step_seconds},
      {"model_flops_utilisation", plan.model_flops_utilisation},
      {"peak_bytes", plan.peak_bytes},
      {"unknown", plan.unknown}};
}

std::vector<std::string>
row_of(const Job& job, int64_t ranks, const predict::Replanned& plan) {
  const double rate = static_cast<double>(job.train.batch) / plan.step_seconds;
  const bool known = plan.step_seconds > 0;
  return {
      "  " + std::to_string(ranks),
      to_string(plan.layout),
      to_string(plan.recompute),
      known ? format_seconds(plan.step_seconds) : "–",
      known ? format_number(rate) : "–",
      known ? format_bytes(plan.peak_bytes) : "–"};
}

}  // namespace

int print_replans(
    const Job& job, const JobFacts& facts, const RankCounts& counts,
    const cluster::Cluster* cluster, bool json) {
  const int64_t step = counts.per_host > 0 ? counts.per_host : 1;
  CountedLayers counted_layers;
  Json list = Json::array();
  std::vector<std::vector<std::string>> rows = {
      {"  ranks", "layout", "recompute", "a step", "samples/s",
       "memory of a rank"}};
  std::string unknown;
  bool any = false;
  for (int64_t ranks = counts.low; ranks <= counts.high; ranks += step) {
    try {
      const auto plan = replan_for(
          job, facts, ranks, counts.per_host, counted_layers, cluster);
      list.push_back(to_json(job, ranks, plan));
      rows.push_back(row_of(job, ranks, plan));
      if (unknown.empty()) unknown = plan.unknown;
      any = true;
    } catch (const ConfigError& error) {
      list.push_back({{"ranks", ranks}, {"because", error.what()}});
      rows.push_back(
          {"  " + std::to_string(ranks), "nothing fits", "", "", "", ""});
    }
  }
  if (json) {
    print_json({{"sizes", list}}, std::cout);
  } else {
    const Style style = terminal_style();
    std::cout << format(
                     "{}, {} at the start\n", job.document.name(),
                     to_string(job.layout))
              << fitted(rows, style.columns, true);
    if (!unknown.empty()) {
      std::cout << "\n"
                << prose(
                       "A layout without a time is the nearest one that the "
                       "model and the batch allow. " +
                           unknown,
                       0, style.columns)
                << "\n";
    }
  }
  return any ? 0 : static_cast<int>(ExitCode::failure);
}

Replans::Replans(
    const Job& job, const JobFacts& facts, const RankCounts& counts)
    : job_(job), facts_(facts), counts_(counts), config_(job) {
  start();
}

Replans::~Replans() {
  if (planner_ <= 0) return;
  ::kill(planner_, SIGTERM);
  ::waitpid(planner_, nullptr, 0);
}

// Without a planner, plans are made when they are asked for.
void Replans::start() {
  std::error_code error;
  std::vector<std::string> command = {
      std::filesystem::read_symlink("/proc/self/exe", error).string(),
      "plan",
      config_.path(),
      "--elastic",
      format("{}:{}", counts_.low, counts_.high),
      "--json"};
  if (counts_.per_host > 0) {
    command.insert(command.end(), {"-n", std::to_string(counts_.per_host)});
  }
  const std::string path = folder_.path() + "/plans.json";
  const auto argv = launch::argv_of(command);
  planner_ = ::fork();
  if (planner_ != 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  (void)!::nice(10);  // the job's first steps go first
  const int null = ::open("/dev/null", O_RDWR);
  const int out = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ::dup2(null, 0);
  ::dup2(out, 1);
  ::dup2(null, 2);
  ::execv(argv[0], argv.data());
  ::_exit(127);
}

// Takes what the planner has found, once it has ended.
void Replans::take_table() {
  if (planner_ <= 0 || ::waitpid(planner_, nullptr, WNOHANG) == 0) return;
  planner_ = -1;
  try {
    const Json table =
        Json::parse(read_text_file(folder_.path() + "/plans.json"));
    for (const Json& row : table.at("sizes")) {
      if (!row.contains("layout")) continue;
      plans_[row.at("ranks").get<int>()] = {
          .text = row.at("text"),
          .step_seconds = row.at("step_seconds"),
          .model_flops_utilisation = row.at("model_flops_utilisation"),
          .unknown = row.at("unknown")};
    }
  } catch (const std::exception&) {
    plans_.clear();
  }
}

std::string Replans::layout(int num_ranks) {
  take_table();
  if (!plans_.contains(num_ranks)) {
    CountedLayers counted_layers;
    const auto plan =
        replan_for(job_, facts_, num_ranks, counts_.per_host, counted_layers);
    plans_[num_ranks] = {
        .text = to_text(job_, plan),
        .step_seconds = plan.step_seconds,
        .model_flops_utilisation = plan.model_flops_utilisation,
        .unknown = plan.unknown};
  }
  const Row& plan = plans_.at(num_ranks);
  if (num_ranks != job_.layout.num_ranks() && !plan.unknown.empty() &&
      !std::exchange(said_unknown_, true)) {
    std::cerr << format(
        "echelon: {}: the nearest layout is taken. {}\n",
        counted(num_ranks, "rank"), plan.unknown);
  }
  return plan.text;
}

std::optional<double> Replans::step_seconds(int num_ranks) {
  take_table();
  if (planner_ > 0) return std::nullopt;
  const Row* row = find(num_ranks);
  return row == nullptr ? 0 : row->step_seconds;
}

// The FLOPs of the model are those that the plan counts.
std::optional<double> Replans::peak_seconds(int num_ranks) {
  const auto predicted = step_seconds(num_ranks);
  const Row* row = find(num_ranks);
  if (!predicted || row == nullptr) return predicted;
  return *predicted * row->model_flops_utilisation;
}

const Replans::Row* Replans::find(int num_ranks) const {
  const auto at = plans_.find(num_ranks);
  return at == plans_.end() ? nullptr : &at->second;
}

}  // namespace echelon::cli
