// The layouts of a job whose number of ranks changes, chosen before it does.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "echelon/cli/programs.h"
#include "echelon/job/check_job.h"
#include "echelon/job/job.h"
#include "echelon/predict/replan.h"

namespace echelon::cli {

/// Numbers of ranks.
struct RankCounts {
  int64_t low = 1;
  int64_t high = 1;
  int64_t per_host = 0;  // above 0: hosts of so many come and go; 0: one host
};

/// Prints the layouts of `job` on each of these numbers of ranks, as it will
/// choose them itself. On `cluster`; null: on this machine. Returns the exit
/// code.
int print_replans(
    const Job& job, const JobFacts& facts, const RankCounts& counts,
    const cluster::Cluster* cluster, bool json);

/// The same layouts for the launcher of a job that runs. `echelon plan` finds
/// them beside the job's first steps; other numbers of ranks are planned when
/// they are asked for.
class Replans {
 public:
  /// `job` and `facts` must outlive this.
  Replans(const Job& job, const JobFacts& facts, const RankCounts& counts);
  ~Replans();
  Replans(const Replans&) = delete;
  Replans& operator=(const Replans&) = delete;

  /// predict::to_text() of the layout. Throws ConfigError where none fits.
  std::string layout(int num_ranks);
  /// The predicted seconds of a step; 0: not known; none: it is being planned.
  /// Does not wait.
  std::optional<double> step_seconds(int num_ranks);
  /// How long a step would take if all devices computed at their peak; as
  /// step_seconds().
  std::optional<double> peak_seconds(int num_ranks);

 private:
  struct Row {
    std::string text;
    double step_seconds = 0;
    double model_flops_utilisation = 0;
    std::string unknown;
  };
  const Row* find(int num_ranks) const;
  void start();
  void take_table();

  const Job& job_;
  const JobFacts& facts_;
  const RankCounts counts_;
  launch::ScratchFolder folder_;
  ScratchConfig config_;
  pid_t planner_ = -1;
  std::map<int, Row> plans_;  // by number of ranks
  bool said_unknown_ = false;
};

}  // namespace echelon::cli
