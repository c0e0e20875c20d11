// How the work of a run is divided among its ranks by their measured speed
// ([train] rebalance_every): the samples of each batch, and the layers of a
// pipeline. The trainer says what ranks worked in each step, and makes the
// changes of stages that this decides on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/data/loader.h"
#include "echelon/job/job.h"
#include "echelon/train/batch_division.h"
#include "echelon/train/run_log.h"
#include "echelon/train/stage_cuts.h"
#include "echelon/train/strategies/model_partition.h"

namespace echelon {

/// Every rank of the world makes one, at the same time, and calls its functions
/// at the same time.
class Rebalancing {
 public:
  /// Whether a job has work that may be divided anew. Throws ConfigError where
  /// it asks for that on devices whose work is not measured.
  static bool is_wanted(const Job& job, const World& world);

  /// A run that goes on begins with the division of the batch that it had. Its
  /// stages are those of [model] balance, which may measure.
  ///
  ///   stages       of the model; null: it has none
  ///   saves        whether training can keep its state while stages change
  ///   cut_seconds  what a change of stages costs, as this rank measured it;
  ///                rank 0's counts
  Rebalancing(
      const Job& job, World& world, const MeshGroups& groups,
      const ModelPartition* stages, bool saves, double cut_seconds,
      Loader& loader, RunLog& log);

  /// A step with a full batch has ended. Divides the batch anew where that
  /// pays, or decides so of the stages.
  ///
  ///   work        by rank of the world: seconds without waits for others
  ///   steps_left  in the run
  void
  after_step(int64_t step, const std::vector<double>& work, int64_t steps_left);

  /// Whether stages should be cut anew before the next step.
  bool wants_cut() const { return cut_.has_value(); }
  /// The first layer of each new stage but the first, for [model] cut.
  std::vector<std::string> new_cut() const;
  /// The new stages are in use; the change took this rank so many seconds.
  void cut_done(double seconds);
  /// The state could not be saved: stages stay as they are from now on.
  void cut_failed();

 private:
  void begin_batch();
  void begin_stages(const ModelPartition& stages, bool saves);
  void agree_on_cost(double seconds);

  const Job& job_;
  World& world_;
  const MeshGroups& groups_;
  Loader& loader_;
  RunLog& log_;
  std::optional<BatchDivision> batch_;  // where it may change
  std::optional<StageCuts> stages_;     // the same
  std::vector<std::string> layers_;     // names
  std::optional<timeline::Rebalance> cut_;
  double cut_seconds_ = 0;
};

}  // namespace echelon
