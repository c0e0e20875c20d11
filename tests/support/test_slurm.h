// A real Slurm for a test: a controller and a daemon for each node, as root,
// without systemd and control groups. Each node is a test host (test_hosts.h),
// so that nothing of it is seen outside: node n0 is 10.83.0.1, n1 is 10.83.0.2.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/test_hosts.h"

namespace echelon::testing_support {

struct SlurmOptions {
  int nodes = 2;
  /// Of each node: device files that nothing stands behind.
  int gpus = 0;
  /// With slurmdbd and a MariaDB of its own: accounts, limits, and pre-emption
  /// by QOS. A pre-empted job is queued again.
  bool accounting = false;
};

class TestSlurm {
 public:
  /// A job's exit code 75 queues it again, and 93 holds it.
  explicit TestSlurm(const SlurmOptions& options = {});
  /// Ends all jobs, the daemons, and every process that they have started.
  ~TestSlurm();
  TestSlurm(const TestSlurm&) = delete;
  TestSlurm& operator=(const TestSlurm&) = delete;

  /// Why there is none; empty when there is. A test that gets a reason is
  /// skipped with it.
  const std::string& reason() const { return reason_; }
  /// `words` (srun, sbatch, …) as a command on the first node, in folder().
  std::vector<std::string>
  on_first(const std::vector<std::string>& words) const;
  /// What such a command prints to stdout, without the last newline. Throws
  /// when it fails.
  std::string output_of(const std::vector<std::string>& words) const;
  /// Queues a batch script and returns the job's number. What it prints is
  /// added to the file folder()/out.
  std::string submit(
      const std::string& script,
      const std::vector<std::string>& options = {}) const;
  /// "RUNNING", "COMPLETED", …
  std::string state_of(const std::string& job) const;
  bool until_state(const std::string& job, const std::string& state) const;

  /// With accounting: an account whose jobs may have so many GPUs by the QOS
  /// `NAME-guaranteed`, for which Slurm pre-empts jobs of the QOS `overquota`.
  /// Those may have any number, and it is every account's default.
  void add_project(const std::string& name, int64_t gpus) const;

  /// A node dies with all that runs on it; the controller is told.
  void lose_node(int node);

  std::string folder() const { return folder_.path(); }

 private:
  std::string start();
  void start_node(int node);
  void start_accounting();
  std::vector<std::string>
  on(int node, const std::vector<std::string>& words) const;

  SlurmOptions options_;
  TempFolder folder_;
  TestHosts hosts_;
  std::vector<std::unique_ptr<Command>>
      daemons_;  // of munge, the database and the controller
  std::vector<std::unique_ptr<Command>> nodes_;
  std::string reason_;
};

}  // namespace echelon::testing_support
