// The steps of training on a GPU as CUDA graphs: the first steps run eagerly,
// then one is captured, and the steps after it replay that one, without a
// launch for each kernel.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/data/dataset.h"
#include "echelon/job/job.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// A stream for a thread that trains: nothing is captured on the default one.
/// While it lives, it is the thread's current stream of its device, if the
/// job's steps are captured. Make it before the model.
class StreamForGraphs {
 public:
  /// Throws ConfigError where [train] cuda_graphs is "on" and ranks have no
  /// GPU.
  StreamForGraphs(const Job& job, const World& world);
  ~StreamForGraphs();
  StreamForGraphs(const StreamForGraphs&) = delete;
  StreamForGraphs& operator=(const StreamForGraphs&) = delete;

 private:
  void wait_for(c10::Stream stream) const;

  const torch::Device device_;
  std::optional<c10::StreamGuard> guard_;
};

/// Both halves of a step, captured or not. Between them the caller sums over
/// the ranks. Every rank makes the same calls with batches of equal shapes in
/// the same steps, so that all capture or none: a replay begins with the
/// all-gathers of the update before it. Not thread-safe.
///
///   const Score score = graphs.forward_backward(batch, counts, false);
///   …
///   const auto numbers = graphs.update(step, measure, layers, skip);
class StepGraphs {
 public:
  /// How many eager steps in a row, of batches with equal shapes, come before a
  /// capture.
  static constexpr int64_t kFirst = 3;

  /// Every rank calls this. Keeps references to its arguments. `tell` is called
  /// with warnings.
  StepGraphs(
      const Job& job, World& world, TrainingState& state,
      timeline::Recorder& recorder,
      std::function<void(const std::string& line)> tell);
  ~StepGraphs();

  /// ParallelModel::forward_backward().
  ///
  ///   eager  run this step without a graph, because its spans are recorded
  Score forward_backward(const Batch& batch, bool count_units, bool eager);

  /// TrainingState::update_on_device(). A graph measures norms in each step,
  /// others where `measure_norms` asks for it.
  ///
  ///   layers  whose norms are measured too; null: none
  torch::Tensor update(
      int64_t step, bool measure_norms, const std::vector<std::string>* layers,
      const torch::Tensor& skip);

  /// Call it before anything else uses the model, also between the halves of a
  /// step. It finishes the update that a replay left open. Between two steps it
  /// also frees the graphs' memory where the device has no room for both.
  void leave();
  /// Call it when parameters or the loss scale have moved to other memory: the
  /// next step is captured anew.
  void drop();

 private:
  struct Captured;

  void capture(const Batch& batch, bool count_units);
  void while_capturing(const std::function<void()>& body);
  void give(const Batch& batch);
  void come_back();
  bool make_room(bool known);
  void stay_eager(const std::string& why);
  void tell_if_often();

  World& world_;
  const torch::Device device_;
  TrainingState& state_;
  timeline::Recorder& recorder_;
  const std::function<void(const std::string& line)> tell_;
  const CudaGraphs choice_;
  bool captures_;
  std::unique_ptr<Captured> captured_;
  bool in_graph_ = false;          // the step is, from forward_backward() on
  bool between_halves_ = false;    // of such a step
  bool update_is_open_ = false;    // end_update() is left to the next step
  bool has_left_ = true;           // since the last replay
  int64_t graph_bytes_ = 0;        // about what a graph needs
  bool gave_memory_back_ = false;  // on some rank: of eager steps, for a graph
  std::vector<int64_t> captured_key_;
  std::vector<int64_t> key_;  // of the last step, if it was eager
  int64_t in_a_row_ = 0;      // eager steps with key_
  int64_t num_captures_ = 0, num_steps_ = 0;
  bool told_ = false;
};

}  // namespace echelon
