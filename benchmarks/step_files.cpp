// What the files of a watched run cost its rank 0 in each step: the time to
// append a step to metrics.jsonl, to TensorBoard's events and to the traces.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/timeline/event_file.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/trace_file.h"

namespace {

using echelon::timeline::Phase;
using echelon::timeline::StepMetrics;

constexpr int kRounds = 5;
constexpr int64_t kSteps = 20000;

StepMetrics step_of(int64_t number) {
  StepMetrics step;
  step.step = number;
  step.epoch = 1e-4 * static_cast<double>(number);
  step.loss = 2.3 / static_cast<double>(number);
  step.samples_per_second = 98765.4321;
  step.step_seconds = 2.591e-3;
  step.data_seconds = 1.234e-5;
  step.forward_seconds = 1.012e-3;
  step.backward_seconds = 1.234e-3;
  step.communication_seconds = 3.21e-5;
  step.update_seconds = 1.23e-4;
  step.learning_rate = 1e-3;
  step.grad_norm = 1.2345;
  step.slowest_rank = 1;
  step.flops_per_second = 1.2e10;
  step.mfu = 0.4321;
  return step;
}

template <class Append>
void time(const char* name, const Append& append) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < kSteps; ++i) append(round * kSteps + i + 1);
    const std::chrono::duration<double, std::micro> all =
        std::chrono::steady_clock::now() - begin;
    rounds.push_back(all.count() / kSteps);
  }
  std::ranges::sort(rounds);
  std::printf(
      "%-14s %6.2f us a step (%.2f to %.2f)\n", name, rounds[kRounds / 2],
      rounds.front(), rounds.back());
}

}  // namespace

int main() {
  namespace fs = std::filesystem;
  using namespace echelon::timeline;
  const fs::path folder =
      fs::temp_directory_path() / ("step_files-" + std::to_string(::getpid()));
  fs::create_directories(folder);
  MetricsWriter metrics(folder / "metrics.jsonl");
  time("metrics.jsonl", [&](int64_t step) { metrics.append(step_of(step)); });
  EventFile events(folder / "tensorboard", 2);
  time("tensorboard", [&](int64_t step) { events.append(step_of(step)); });
  TraceFile traces(folder / "otlp.jsonl", {{"service.name", "echelon"}}, "0");
  const std::vector<Phase> parts = {
      {"data", 0, 10},
      {"forward", 10, 20},
      {"backward", 20, 30},
      {"communication", 30, 40},
      {"update", 40, 50}};
  time("otlp", [&](int64_t step) {
    traces.append(step_of(step), {"step", 0, 50}, parts);
  });
  fs::remove_all(folder);
}
