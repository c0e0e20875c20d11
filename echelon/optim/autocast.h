// Automatic mixed precision for your own training loop: the model and its
// parameters stay in float32, and operators that are fast in low precision cast
// their inputs.
//
//   {
//     Autocast low(torch::kCPU, torch::kBFloat16);
//     loss = loss_of(model->forward(x), y);
//   }
//   loss.backward();        // outside: gradients arrive in float32
//   optimizer->step();      // outside: see below
//
// fp16 also needs a LossScaler (loss_scaler.h). A model whose layers are all in
// low precision takes less memory and time: precision.compute of a job.
#pragma once

#include <torch/types.h>

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

}  // namespace echelon
