// The device that a rank computes on, an accelerator or a share of a processor:
// its published peaks, and what was measured on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::cluster {

/// The precision of matmuls.
enum class Precision { fp64, fp32, tf32, bf16, fp16, fp8, fp4 };

inline constexpr std::array<Precision, 7> kPrecisions = {
    Precision::fp64, Precision::fp32, Precision::tf32, Precision::bf16,
    Precision::fp16, Precision::fp8,  Precision::fp4};

/// "bf16".
std::string_view to_string(Precision precision);
/// Throws ConfigError for another word, with the nearest.
Precision precision_from_name(std::string_view name);

/// What computes a matmul: kernels of each kind reach rates of their own.
enum class ProductKind {
  product,
  convolution,  // m: positions of all images, n: filters, k: filter elements
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

/// FLOPs as rates count them: 2 m n k of a matmul; of attention the scores and
/// their matmul with the values; of its gradients two and a half times that.
double product_flops(ProductKind kind, double m, double n, double k);

/// A matmul's rate as measured on this device (`echelon bench --save`). On a
/// processor the launch overhead is subtracted.
struct MatrixRate {
  Precision precision = Precision::fp32;
  int64_t m = 0, n = 0, k = 0;
  double flops_per_second = 0;
  ProductKind kind = ProductKind::product;

  bool operator==(const MatrixRate&) const = default;
};

/// The same of an operator that is bound by memory or slow per element; `bytes`
/// counts each of its tensors once.
struct OperatorRate {
  std::string name;  // "gelu"; "add" stands for all that have none
  double bytes = 0;
  double bytes_per_second = 0;

  bool operator==(const OperatorRate&) const = default;
};

/// Launch overhead of an operator in training, by the bytes that neighbouring
/// operators move: their tensors evict the host's own data from the caches.
struct LaunchRate {
  double bytes_beside = 0;      // of a neighbouring operator, on average
  double seconds = 0;           // in forward, with autograd's recording
  double backward_seconds = 0;  // in backward
  double view_seconds = 0;      // in forward, of a view: it computes nothing
  double backward_view_seconds = 0;

  bool operator==(const LaunchRate&) const = default;
};

struct Device {
  std::string name;  // "h100-sxm", as the catalogue and cluster files spell it
  /// The device of the catalogue that reaches the same shares of its peaks, as
  /// a cluster file declares it; empty: the one of its own name, if there is
  /// one.
  std::string like;
  double memory_bytes = 0;
  double memory_bytes_per_second = 0;
  /// Dense peaks by precision; 0: the device has none.
  std::array<double, kPrecisions.size()> peak_flops_per_second{};
  /// The price of one device, for the planner's costs; 0: not known.
  double price_per_hour = 0;
  std::string source;  // of the figures
  /// Measured; empty for devices of the catalogue, whose shares of the peaks
  /// are in cost/device_rates.h.
  std::vector<MatrixRate> matrix_rates;
  std::vector<OperatorRate> operator_rates;
  double launch_seconds = 0;  // launch overhead, measured; 0: not measured
  /// Launch overhead by what neighbours move; empty: `launch_seconds` for all.
  std::vector<LaunchRate> launch_rates;
  /// A share of a processor: it is its own host, so launching and sending take
  /// time from computing.
  bool processor = false;

  bool measured() const { return !matrix_rates.empty(); }

  double peak(Precision precision) const {
    return peak_flops_per_second[static_cast<size_t>(precision)];
  }
  bool operator==(const Device&) const = default;
};

}  // namespace echelon::cluster
