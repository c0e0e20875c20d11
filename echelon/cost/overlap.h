// Collectives beside the layers that they belong to, in the order of a pass.
//
// Sources: Li et al., "PyTorch Distributed", 2020, arXiv:2006.15704 (gradients, as
// soon as they are ready); Zhao et al., 2023, arXiv:2304.11277 (parameters, one layer
// ahead).
#pragma once

#include <algorithm>
#include <cstdint>

namespace echelon {

/// Each layer's collective begins when the layer has computed and the collective
/// before it is over: gradients in a backward pass.
class TrailingCollectives {
 public:
  /// `repeat` layers that are alike, of these seconds each. Of them either the first
  /// or the last holds up the rest.
  void add(double computation, double communication, int64_t repeat = 1) {
    const double n = static_cast<double>(repeat);
    over_ = std::max(
        {over_ + n * communication,
         computed_ + computation + n * communication,
         computed_ + n * computation + communication});
    computed_ += n * computation;
  }
  /// Seconds after the last layer until the last collective is over.
  double exposed() const { return std::max(0.0, over_ - computed_); }

 private:
  double computed_ = 0;
  double over_ = 0;
};

/// Each layer's collective must be over before it computes, and runs while the layer
/// before it does: parameters in a forward pass.
class LeadingCollectives {
 public:
  void add(double computation, double communication, int64_t repeat = 1) {
    if (repeat <= 0) return;
    const double n = static_cast<double>(repeat);
    exposed_ += std::max(0.0, communication - before_) +
        (n - 1) * std::max(0.0, communication - computation);
    before_ = computation;
  }
  /// Seconds that layers wait.
  double exposed() const { return exposed_; }

 private:
  double before_ = 0;  // that the layer before computes
  double exposed_ = 0;
};

}  // namespace echelon
