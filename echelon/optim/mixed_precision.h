// Mixed precision: autocast for your own training loop, and loss scaling for
// fp16.
//
// With autocast the model and its parameters stay in float32, and operators
// that are fast in low precision cast their inputs.
//
//   {
//     Autocast low(torch::kCPU, torch::kBFloat16);
//     loss = loss_of(model->forward(x), y);
//   }
//   loss.backward();        // outside: gradients arrive in float32
//   optimizer->step();      // outside: see below
//
// fp16 also needs a LossScaler. A model whose layers are all in low precision
// takes less memory and time: precision.compute of a job.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "echelon/optim/clip.h"
#include "echelon/options/precision.h"

namespace echelon {

/// While it lives, matmuls, convolutions and attention of this thread on
/// `device` compute in `dtype`. Operators that would lose accuracy, such as
/// losses, compute in float32, by LibTorch's lists. Guards nest; one with
/// `enabled` false suspends an outer one. Each thread has its own.
///
/// A parameter is cast once, and the cast is kept until the outermost guard
/// ends. Update parameters outside of all guards; otherwise the operators that
/// follow compute with the old values.
///
/// Throws ConfigError for a dtype other than bf16 and fp16, or a device type
/// that has no autocast.
class Autocast {
 public:
  Autocast(torch::DeviceType device, torch::Dtype dtype, bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  torch::DeviceType device_;
  torch::Dtype outer_dtype_;
  bool outer_enabled_;
};

/// Loss scaling for fp16. The loss is multiplied by a scale before backward, so
/// that small gradients do not vanish, and gradients are divided by it before
/// the update. All ranks skip a step in which any rank has a gradient that is
/// not finite. One per rank; equal calls give equal scales on all ranks. The
/// scale is kept on the device of the gradients, and changes there.
/// Source: Micikevicius et al., 2018, arXiv:1710.03740, section 3.2.
class LossScaler {
 public:
  /// `dynamic`: options.loss_scale is 0 and the compute dtype is fp16. Throws
  /// ConfigError for a scale that is not above 0, or above 2^126.
  LossScaler(const PrecisionOptions& options, bool dynamic);

  bool active() const { return active_; }
  /// The scale, a float64 scalar on the CPU, or where the last gradients were.
  /// A later check_on_device() makes another.
  torch::Tensor scale_on_device() const { return state_[0]; }
  /// Waits for the device.
  double scale() const { return state().scale; }

  /// Divides `gradients` by the scale, in place, and returns whether all of
  /// them are finite, on all ranks that `sum` sums over (null: this one alone).
  /// When it returns false, every rank must skip the update. A dynamic scale is
  /// then halved; after options.loss_scale_growth steps without overflow it is
  /// doubled. Undefined gradients are left out. Waits for the device.
  ///
  /// Throws NumericError, on every rank, at options.max_overflows skipped steps
  /// in a row. The message has their number, the scale and what to do.
  bool
  unscale(const std::vector<torch::Tensor>& gradients, const SumOverRanks& sum);

  /// The same without a wait and without the division: the gradients are read
  /// and stay as they are, and 1 / scale is a factor of Optimizer::step() and
  /// of their norms. Returns [overflowed, scale, overflows], float64 on the
  /// device of the gradients: 1 when the update must be skipped, else 0; the
  /// scale that the gradients have; steps skipped in a row.
  ///
  ///   skip  as Optimizer::step(): 1 leaves the scaler as it is
  torch::Tensor check_on_device(
      const std::vector<torch::Tensor>& gradients, const SumOverRanks& sum,
      const torch::Tensor& skip = {});
  /// Throws as unscale(), for numbers that check_on_device() returned.
  void check(double scale, double overflows) const;

  /// For checkpoints.
  struct State {
    double scale = 1;
    int64_t good_steps = 0;  // since the scale changed
    int64_t overflows = 0;   // steps skipped in a row
  };
  /// Waits for the device.
  State state() const;
  /// Throws CheckpointError for numbers that no scaler has.
  void load_state(const State& state);

 private:
  using Look = torch::Tensor (*)(
      const std::vector<torch::Tensor>& gradients, const torch::Tensor& scale);
  torch::Tensor next(
      const std::vector<torch::Tensor>& gradients, const SumOverRanks& sum,
      const torch::Tensor& skip, Look look);

  PrecisionOptions options_;
  bool dynamic_;
  bool active_;
  torch::Tensor state_;  // the numbers of State, in order, float64
};

}  // namespace echelon
