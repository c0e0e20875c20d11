// The processor time of a pool's decision: 10,000 jobs wait for 1,024 devices
// of 20 projects. Prints the median and the slowest of the decisions of each
// kind.
//
//   build/benchmarks/pool_decide [JOBS] [DEVICES]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "echelon/pool/decide.h"

namespace {

using namespace echelon::pool;

State make(int64_t jobs, int64_t devices, int seed) {
  constexpr int kProjects = 20;
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto from = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  State state;
  state.now = 1e6;
  for (int64_t d = 0; d < devices; ++d) {
    state.devices.push_back({.group = static_cast<int>(d / 8)});
  }
  for (int p = 0; p < kProjects; ++p) {
    state.projects.push_back(
        {.name = "p" + std::to_string(p),
         .parent = p < 4 ? -1 : p % 4,
         .guaranteed = p < 4 ? devices / 5 : devices / 25,
         .weight = static_cast<double>(from(1, 4))});
  }
  for (int64_t j = 0; j < jobs; ++j) {
    Job job{
        .id = j,
        .project = static_cast<int>(from(4, kProjects - 1)),
        .least = int64_t{1} << from(0, 4),
        .kept = static_cast<Kept>(from(0, 2)),
        .priority = from(0, 2),
        .submitted = state.now - static_cast<double>(from(0, 3600))};
    job.most = job.least * (int64_t{1} << from(0, 2));
    job.waiting_since = job.submitted;
    state.jobs.push_back(job);
  }
  return state;
}

// Of the processor: a decision is one thread and waits for nothing, and other
// programs may have the machine meanwhile.
double milliseconds_of(const State& state, Decision& decision) {
  const std::clock_t began = std::clock();
  decision = decide(state);
  return 1e3 * static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
}

void print(const char* what, std::vector<double> times) {
  std::ranges::sort(times);
  std::printf(
      "%-40s median %6.1f ms, slowest %6.1f ms\n", what,
      times[times.size() / 2], times.back());
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t jobs = argc > 1 ? std::atoll(argv[1]) : 10'000;
  const int64_t devices = argc > 2 ? std::atoll(argv[2]) : 1'024;
  std::vector<double> empty, full, ended;
  for (int seed = 0; seed < 20; ++seed) {
    State state = make(jobs, devices, seed);
    Decision decision;
    empty.push_back(milliseconds_of(state, decision));
    state = after(std::move(state), decision);
    full.push_back(milliseconds_of(state, decision));
    // A tenth of the jobs that run end.
    int number = 0;
    std::erase_if(state.jobs, [&](const Job& job) {
      return !job.devices.empty() && ++number % 10 == 0;
    });
    ended.push_back(milliseconds_of(state, decision));
  }
  std::printf(
      "%lld jobs, %lld devices, 20 projects of two levels\n",
      static_cast<long long>(jobs), static_cast<long long>(devices));
  print("the pool is empty, all jobs wait", empty);
  print("the pool is full, nothing changes", full);
  print("a tenth of the jobs has ended", ended);
}
