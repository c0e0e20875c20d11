// Runs as their trainer and launcher leave them, without either.
#pragma once

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>

#include "echelon/monitoring/run_status.h"
#include "echelon/text/format.h"
#include "tests/support/temp_folder.h"

namespace echelon::written_run {

inline std::string step_line(int64_t step, const std::string& loss) {
  return format(
      "{{\"step\":{},\"epoch\":{},\"loss\":{},\"samples_per_second\":640,"
      "\"step_seconds\":0.1,\"data_seconds\":0.01,\"learning_rate\":0.001,"
      "\"grad_norm\":1.5}}\n",
      step, 0.1 * static_cast<double>(step), loss);
}

inline std::string steps(int64_t first, int64_t last) {
  std::string lines;
  for (int64_t step = first; step <= last; ++step) {
    lines += step_line(step, format("{}", 2.0 / static_cast<double>(step)));
  }
  return lines;
}

inline void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text;
}

inline double now() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

inline std::string this_host() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

/// As the launcher of this process would say it now, of two ranks that train.
inline monitoring::RunStatus living() {
  monitoring::RunStatus status;
  status.host = this_host();
  status.pid = ::getpid();
  status.process = monitoring::process_name(::getpid());
  status.beat = 1;
  status.time = now();
  status.started = status.time - 60;
  status.world_size = 2;
  for (int rank = 0; rank < 2; ++rank) {
    status.ranks.push_back(
        {.rank = rank,
         .pid = 100 + rank,
         .up = true,
         .phase = "step",
         .progress = 9,
         .idle_seconds = 0.5,
         .resident_bytes = 1.5 * (1 << 30)});
  }
  return status;
}

inline void
write(const TempFolder& folder, const monitoring::RunStatus& status) {
  folder.write("run/status/rank-0.json", to_json(status));
}

inline constexpr const char* kConfiguration =
    "[model]\nname = \"simple_cnn\"\nclasses = 10\n"
    "[data]\nname = \"digits\"\npath = \"digits.csv\"\n"
    "[layout]\ndp = 2\n"
    "[train]\nsteps = 100\nrun = \"run\"\n";

/// A run of 100 steps that has done 40.
inline void write_run(const TempFolder& folder) {
  folder.write("run/config.toml", kConfiguration);
  folder.write("run/metrics.jsonl", steps(1, 40));
}

}  // namespace echelon::written_run
