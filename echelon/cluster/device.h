// One accelerator (or CPU share) that a rank computes on: its published peaks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

/// What matrix products are computed in.
enum class Precision { fp64, fp32, tf32, bf16, fp16, fp8, fp4 };

inline constexpr std::array<Precision, 7> kPrecisions = {
    Precision::fp64, Precision::fp32, Precision::tf32, Precision::bf16,
    Precision::fp16, Precision::fp8,  Precision::fp4};

/// "bf16".
std::string_view to_string(Precision precision);
/// Throws ConfigError for another word, with the nearest.
Precision precision_from_name(std::string_view name);

/// What computes a product: kernels of each kind reach rates of their own.
enum class ProductKind {
  product,
  convolution,  // m: positions of all images, n: filters, k: elements of a
                // filter
  convolution_inputs,  // gradients; m, n, k of the forward pass
  convolution_weights,
  attention,  // scores [m, n] of heads of k elements, fused
  attention_gradients,
};

inline constexpr std::array<ProductKind, 6> kProductKinds = {
    ProductKind::product,
    ProductKind::convolution,
    ProductKind::convolution_inputs,
    ProductKind::convolution_weights,
    ProductKind::attention,
    ProductKind::attention_gradients};

/// "convolution weights".
std::string_view to_string(ProductKind kind);
/// Throws ConfigError for another word, with the nearest.
ProductKind product_kind_from_name(std::string_view name);

/// FLOPs of such a product, as rates count them: 2 m n k; of attention the
/// scores and their product with the values, of its gradients two and a half
/// times that.
double product_flops(ProductKind kind, double m, double n, double k);

/// A rate that was measured on this very device: `echelon bench --save`. What
/// starting the operator takes is left out on a processor.
struct MatrixRate {
  Precision precision = Precision::fp32;
  int64_t m = 0, n = 0, k = 0;
  double flops_per_second = 0;
  ProductKind kind = ProductKind::product;

  bool operator==(const MatrixRate&) const = default;
};

/// The same of an operator that is bound by memory, or whose elements take
/// long: bytes of its tensors, each once.
struct OperatorRate {
  std::string name;  // "gelu"; "add" stands for all that have none
  double bytes = 0;
  double bytes_per_second = 0;

  bool operator==(const OperatorRate&) const = default;
};

/// What starting an operator takes the host in training, where the operators
/// around it move so much: their tensors push the host's own work out of the
/// caches.
struct LaunchRate {
  double bytes_beside = 0;      // of an operator, on average
  double seconds = 0;           // forwards, with recording it
  double backward_seconds = 0;  // of one that a gradient runs
  double view_seconds = 0;  // forwards, of one that computes nothing: a view
  double backward_view_seconds = 0;

  bool operator==(const LaunchRate&) const = default;
};

/// What the trainer does beside the operators of a network, measured; 0: not
/// measured, or hidden by a device that computes meanwhile. It takes longer
/// behind long computing, whose code has pushed the trainer's own out of the
/// caches.
struct HostWork {
  double step_seconds =
      0;  // of a step: batch, sums over the ranks, update, metrics
  double layer_seconds = 0;  // of a layer with parameters: its gradients' way
                             // to the update
  double pass_seconds = 0;   // of a microbatch: its part of the batch, its loss
  double action_seconds =
      0;  // of a pipeline's action: its messages and bookkeeping
  double pipeline_seconds = 0;  // of a pipeline's step, beside that of any: its
                                // ranks agree on shapes
  double operator_seconds = 0;  // of each kind of operator, in a step's first
                                // microbatch: its code is cold, too
  double computing_seconds =
      0;  // of a rank between: its layers, for a microbatch

  bool operator==(const HostWork&) const = default;
};

struct Device {
  std::string name;  // "h100-sxm", as the catalogue and cluster files spell it
  /// The device of the catalogue whose shares of its peaks this one reaches, as
  /// a cluster file declares it; empty: the one of its own name, if there is
  /// one.
  std::string like;
  double memory_bytes = 0;
  double memory_bytes_per_second = 0;
  /// Dense peaks by precision; 0: the device has none.
  std::array<double, kPrecisions.size()> peak_flops_per_second{};
  /// Of one device, for the planner's costs; 0: not known.
  double price_per_hour = 0;
  std::string source;  // where the figures are from
  /// Measured; empty for devices of the catalogue, whose share of the peak is
  /// in cost/device_rates.h.
  std::vector<MatrixRate> matrix_rates;
  std::vector<OperatorRate> operator_rates;
  double launch_seconds = 0;  // of one operator, measured; 0: not measured
  /// The same by what operators around it move; empty: `launch_seconds` for
  /// all.
  std::vector<LaunchRate> launch_rates;
  std::vector<HostWork> host_work;  // by what is computed between; empty: none
  /// Standard deviation of a millisecond of computing from rank to rank,
  /// measured; it grows with the root of the time. Who computes longest is
  /// waited for.
  double jitter_seconds = 0;
  /// A share of a processor: it is its own host, so that launching and sending
  /// take time from computing.
  bool processor = false;

  bool measured() const { return !matrix_rates.empty(); }

  double peak(Precision precision) const {
    return peak_flops_per_second[static_cast<size_t>(precision)];
  }
  bool operator==(const Device&) const = default;
};

}  // namespace echelon
