// One rank that trains a few steps and prints what it held in the last of them:
// the resident set beyond what was there before the model, the meter's peak by
// kind, and the plan of its rank. Started by memory_plan_command_test, by
// `echelon run`.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/shared_memory/arena.h"
#include "echelon/comm/world.h"
#include "echelon/error_report.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/train/strategies/count_job.h"
#include "echelon/train/strategies/step.h"

namespace echelon::memory_plan {
namespace {

// "VmHWM:   12 kB" of /proc/self/status, in bytes.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key + ":", 0) == 0) {
      return std::stoll(line.substr(key.size() + 1)) * 1024;
    }
  }
  return 0;
}

// Pages of the other ranks' tensors that this one has read count as resident
// here.
int64_t bytes_of_peers() {
  char own[32];
  std::snprintf(
      own, sizeof own, "%lx-",
      reinterpret_cast<unsigned long>(local::Arena::of_process().base()));
  std::ifstream maps("/proc/self/smaps");
  bool peer = false;
  int64_t sum = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("-") < line.find(" ") && line.find(':') > line.find(' ')) {
      peer = line.find("memfd:echelon-tensors") != std::string::npos &&
             line.rfind(own, 0) != 0;
    } else if (peer && line.rfind("Rss:", 0) == 0) {
      sum += std::stoll(line.substr(4)) * 1024;
    }
  }
  return sum;
}

Batch random_batch(const Job& job, const ModelSource& source) {
  const int64_t samples = job.train.batch / job.layout.data_ranks();
  const auto shape = [&](const std::vector<int64_t>& of_sample) {
    std::vector<int64_t> whole = {samples};
    whole.insert(whole.end(), of_sample.begin(), of_sample.end());
    return whole;
  };
  const auto inputs = shape(source.sample.input_shape);
  Batch batch;
  batch.inputs = is_text(source.sample)
                     ? torch::randint(source.classes, inputs, torch::kInt64)
                     : torch::rand(inputs);
  batch.targets = torch::randint(
      source.classes, shape(source.sample.target_shape), torch::kInt64);
  batch.global_count = job.train.batch;
  return batch;
}

void train_steps(
    TrainingState& state, const Batch& batch, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    state.model().forward_backward(batch, false);
    state.update(index, false, nullptr);
  }
}

// The program's pages, and what libraries set up when they are first used: a
// very small model does what the large one will do.
void warm_up(
    Job job, const SampleSpec& sample, World& world, const MeshGroups& groups) {
  job.model.layers = 4;
  job.model.hidden_size = 16 * job.model.heads;
  job.model.intermediate_size = 64;
  job.model.vocab_size = 320;
  job.model.hidden = {32, 32};
  job.train.batch = job.layout.data_ranks() * 4;
  const ModelSource source = model_source(job, sample);
  TrainingState state(job, {source, world, groups}, 10);
  train_steps(state, random_batch(job, source), 0, 2);
}

nlohmann::json by_kind(const timeline::MemoryByKind& memory) {
  nlohmann::json bytes;
  for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
    bytes[std::string(timeline::to_string(kind))] = memory[kind];
  }
  return bytes;
}

void run(const std::string& config) {
  const Job job = load_job(config);
  World world = World::from_environment(job.comm);
  at::set_num_threads(1);
  const MeshGroups groups = mesh_groups(world, job);
  const TrainingData data = open_data(job.data, job.train.seed);
  const ModelSource source = model_source(job, data.train->spec());
  const MemoryPlan plan = plan_memory(count_memory(job, source), job);
  const RankPlan& own =
      plan.ranks[static_cast<size_t>(groups.along(Axis::pp).rank())];
  warm_up(job, source.sample, world, groups);
  const Batch batch = random_batch(job, source);
  world.group().barrier();

  const int64_t before = status_bytes("VmRSS") - bytes_of_peers();
  profiling::MemoryMeter meter;
  const auto counting = meter.count();
  TrainingState state(job, {source, world, groups}, 10);
  train_steps(state, batch, 0, 1);
  meter.reset_peak();
  world.group().barrier();
  std::ofstream("/proc/self/clear_refs") << "5";
  train_steps(state, batch, 1, 2);
  const int64_t after = status_bytes("VmHWM") - bytes_of_peers();

  nlohmann::json line;
  line["rank"] = world.rank();
  line["before"] = before;
  line["peers"] = bytes_of_peers();
  line["resident"] = after - before;
  line["measured"] = by_kind(meter.peak());
  line["measured_peak"] = meter.peak().total();
  line["at_rest"] = by_kind(meter.now());
  line["planned"] = by_kind(own.peak);
  line["planned_peak"] = own.peak.total();
  line["moment"] = own.moment;
  line["host"] = own.host_bytes;
  std::cout << line.dump() + "\n" << std::flush;
  world.group().barrier();
}

}  // namespace
}  // namespace echelon::memory_plan

int main(int argc, char** argv) {
  try {
    echelon::memory_plan::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    return echelon::report_error(error);
  }
}
