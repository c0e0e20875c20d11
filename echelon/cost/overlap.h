// Collectives that overlap with the computation of layers, in the order of a
// pass.
//
// Sources: Li et al., "PyTorch Distributed", 2020, arXiv:2006.15704 (gradients,
// as soon as they are ready); Zhao et al., 2023, arXiv:2304.11277 (parameters,
// one layer ahead).
#pragma once

#include <algorithm>
#include <cstdint>

namespace echelon {

/// Each layer's collective begins when the layer has computed and the previous
/// collective has ended: gradients in a backward pass.
class TrailingCollectives {
 public:
  /// `repeat` equal layers, of these seconds each. Either the first or the last
  /// of them holds up the rest.
  void add(double computation, double communication, int64_t repeat = 1) {
    const double n = static_cast<double>(repeat);
    over_ = std::max(
        {over_ + n * communication, computed_ + computation + n * communication,
         computed_ + n * computation + communication});
    computed_ += n * computation;
  }
  /// Seconds from the end of the last layer to that of the last collective.
  double exposed() const { return std::max(0.0, over_ - computed_); }

 private:
  double computed_ = 0;
  double over_ = 0;
};

/// Each layer's collective must end before the layer computes, and runs while
/// the previous layer does: parameters in a forward pass.
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
  double before_ = 0;  // seconds of the previous layer
  double exposed_ = 0;
};

/// All collectives start with the pass and follow each other; each must end
/// before its layer computes: parameters after an update.
class QueuedCollectives {
 public:
  /// `slowdown`: the share of a collective's hidden time by which it slows the
  /// computation that hides it.
  explicit QueuedCollectives(double slowdown) : slowdown_(slowdown) {}

  /// `repeat` equal layers, of these seconds each.
  void add(double computation, double communication, int64_t repeat = 1) {
    for (int64_t i = 0; i < repeat; ++i) {
      there_ += communication;
      const double waits = std::max(0.0, there_ - now_);
      const double lost =
          waits + slowdown_ * std::max(0.0, communication - waits);
      lost_ += lost;
      now_ += lost + computation;
    }
  }
  /// Seconds by which the pass is longer.
  double exposed() const { return lost_; }

 private:
  double slowdown_;
  double now_ = 0;
  double there_ = 0;  // end of the last collective so far
  double lost_ = 0;
};

}  // namespace echelon
