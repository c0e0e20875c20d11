#include "echelon/launch/launch.h"

#include <fcntl.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "echelon/error.h"
#include "echelon/launch/checks.h"
#include "echelon/launch/hosts.h"
#include "echelon/launch/job.h"
#include "echelon/launch/job_start.h"
#include "echelon/launch/restarts.h"
#include "echelon/launch/signals.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

// If 0, 1 or 2 were closed, the launcher's own pipes would get these numbers.
void open_standard_files() {
  int fd = -1;
  do {
    fd = open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd > 2) close(fd);
}

std::string from_step(int64_t step) {
  return step > 0 ? format(", from step {}", step) : ", from the start";
}

// Runs generation after generation until one ends the job.
int run_alone(const LaunchOptions& options) {
  const auto last_step = [&]() -> std::optional<int64_t> {
    if (!options.last_step) return std::nullopt;
    return options.last_step();
  };
  // Signals that come between two generations wait for the next one.
  SignalFile signals;
  Restarts restarts(options.max_restarts);
  const std::string name = random_job_id();
  for (int generation = 0;; ++generation) {
    JobStart start = start_alone(options);
    start.place.job = name;
    start.place.generation = generation;
    start.place.max_restarts = options.max_restarts;
    Job job(options, std::move(start), Hosts(), signals, restarts.left());
    const Outcome outcome = job.run();
    const auto step = last_step();
    switch (restarts.on_end(outcome, step)) {
      case Restarts::Verdict::end:
        return outcome.exit_code;
      case Restarts::Verdict::stuck:
        job.say(format(
            "{} restarts in a row brought no new step, so another one would "
            "not help",
            Restarts::kMostWithoutProgress));
        return static_cast<int>(ExitCode::do_not_requeue);
      case Restarts::Verdict::restart:
        job.say(format(
            "restart {} of {}{}", restarts.count(), options.max_restarts,
            step ? from_step(*step) : ""));
    }
  }
}

}  // namespace

int run(const LaunchOptions& options) {
  check(options);
  open_standard_files();
  find_program(options.command[0]);
  if (options.num_nodes == 1) return run_alone(options);
  JobStart start;
  Hosts hosts = Hosts::meet(options, start);
  SignalFile signals;
  return Job(options, std::move(start), std::move(hosts), signals,
             /*may_restart=*/false)
      .run()
      .exit_code;
}

}  // namespace echelon::launch
