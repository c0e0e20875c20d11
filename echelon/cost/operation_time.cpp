// The time of an operation is measured where the device was (measured_rates.h),
// else a roofline: a norm of its computing and its memory time, since the two
// overlap in part. A matmul reaches a share of the peak that tiles and
// alignment lower. A pass is the sum of its operations on the device; where the
// host takes longer to launch them than the device to run them, the difference
// is `host`.
#include "echelon/cost/operation_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "echelon/cost/memory_estimate.h"

namespace echelon::cost {
namespace {

double ceil_div(double a, double b) {
  return std::ceil(a / b);
}

/// Bytes of an element of inputs and outputs.
double operand_bytes(cluster::Precision precision) {
  if (precision == cluster::Precision::fp8) return 1;
  if (precision == cluster::Precision::fp4) return 0.5;
  return element_bytes(precision);
}

double output_bytes(cluster::Precision precision) {
  return std::max(2.0, operand_bytes(precision));
}

double share_of(cluster::Precision precision, const DeviceRates& rates) {
  return precision == cluster::Precision::fp8 ||
                 precision == cluster::Precision::fp4
             ? rates.matrix_share_fp8
             : rates.matrix_share;
}

/// The peak of a precision, or of the next one that the device has.
double peak_of(const cluster::Device& device, cluster::Precision precision) {
  if (device.peak(precision) > 0) return device.peak(precision);
  switch (precision) {
    case cluster::Precision::fp4:
      return peak_of(device, cluster::Precision::fp8);
    case cluster::Precision::fp8:
      return peak_of(device, cluster::Precision::bf16);
    case cluster::Precision::bf16:
      return device.peak(cluster::Precision::fp16) > 0
                 ? device.peak(cluster::Precision::fp16)
                 : device.peak(cluster::Precision::fp32);
    case cluster::Precision::fp16:
      return device.peak(cluster::Precision::bf16) > 0
                 ? device.peak(cluster::Precision::bf16)
                 : device.peak(cluster::Precision::fp32);
    case cluster::Precision::tf32:
      return device.peak(cluster::Precision::fp32);
    case cluster::Precision::fp64:
      return device.peak(cluster::Precision::fp32) / 2;
    case cluster::Precision::fp32:
      return device.peak(cluster::Precision::fp64);
  }
  return 0;
}

/// Part of the multiprocessors' time that useful tiles take: the last wave and
/// the tiles at the edges are not full. The best of the tile shapes; small ones
/// load more per product (shares: least squares on benchmarks/published).
double
tile_share(int64_t m, int64_t n, int64_t count, const DeviceRates& rates) {
  if (rates.multiprocessors == 0) return 1;
  struct Shape {
    double rows, columns, share;
  };
  const double side = rates.tile;
  double best = 0;
  for (const Shape& shape :
       {Shape{2 * side, side, 1.0}, Shape{side, 2 * side, 1.0},
        Shape{side, side, 0.96}, Shape{side, side / 2, 0.88},
        Shape{side / 2, side, 0.88}, Shape{side / 2, side / 2, 0.76}}) {
    const double tiles = ceil_div(as_double(m), shape.rows) *
                         ceil_div(as_double(n), shape.columns) *
                         as_double(count);
    const double useful = as_double(m) * as_double(n) * as_double(count) /
                          (shape.rows * shape.columns);
    const double slots = rates.multiprocessors;
    best =
        std::max(best, shape.share * useful / (ceil_div(tiles, slots) * slots));
  }
  return best;
}

/// Rows in memory that do not begin at a multiple of 16 bytes are loaded in
/// pieces: a vocabulary of 50257 against one of 50304.
double alignment_share(int64_t n, int64_t k) {
  const int64_t both = n | k;
  if (both % 8 == 0) return 1;
  if (both % 4 == 0) return 0.85;
  return both % 2 == 0 ? 0.6 : 0.33;
}

/// Computation and memory overlap in part: the norm of the two.
double roofline(double compute, double memory, const DeviceRates& rates) {
  const double norm = rates.roofline_norm;
  return std::pow(std::pow(compute, norm) + std::pow(memory, norm), 1 / norm);
}

/// The precision in which frameworks that use fp8 do everything but matmuls.
cluster::Precision wide(cluster::Precision precision) {
  return precision == cluster::Precision::fp8 ||
                 precision == cluster::Precision::fp4
             ? cluster::Precision::bf16
             : precision;
}

double attention_share(
    bool backward, const DeviceRates& rates, const Framework& framework) {
  const double native = backward ? rates.native_attention_backward_share
                                 : rates.native_attention_share;
  if (framework.native_attention && native > 0) return native;
  return framework.attention_speed *
         (backward ? rates.attention_backward_share : rates.attention_share);
}

double attention_seconds(
    const Operation& operation, const Strategy& strategy,
    const cluster::Device& device, const DeviceRates& rates,
    const Framework& framework) {
  // fp8 frameworks keep attention in 16 bit.
  const double peak = peak_of(device, wide(strategy.precision));
  double share = attention_share(operation.backward, rates, framework);
  if (!framework.fused_attention) share = rates.matrix_share;
  return roofline(
      operation.flops / (peak * share),
      memory_seconds(operation.bytes, device, rates), rates);
}

/// The measured seconds of such an operation; nullopt when none of its kind
/// were measured.
std::optional<double> measured_seconds(
    const Operation& operation, cluster::Precision precision,
    const cluster::Device& device) {
  switch (operation.kind) {
    case OperationKind::matrix:
      return measured_product_seconds(
          device, operation.product, precision, as_double(operation.m),
          as_double(operation.n), as_double(operation.k),
          as_double(operation.count));
    case OperationKind::memory:
      return measured_operator_seconds(
          device, operation.name, operation.bytes, operation.bytes_since);
    case OperationKind::attention:
    case OperationKind::collective:
      break;
  }
  return std::nullopt;
}

/// What the host spends on an operator that launches no kernel, in launches: a
/// view goes through the same dispatch.
constexpr double kViewLaunches = 0.3;

/// Ranks that meet in a layer's collectives wait for the slowest of their
/// hosts: the largest of n normal draws is half a standard deviation further
/// for each doubling.
double slowest_host(
    double seconds, const Strategy& strategy, const Framework& framework) {
  const Layout& layout = strategy.layout;
  const double ranks = as_double(layout.tp * layout.cp * layout.ep);
  return seconds * (1 + 0.5 * framework.host_spread * std::log2(ranks));
}

}  // namespace

bool steps_are_graphs(
    const Strategy& strategy, const cluster::Cluster& cluster,
    const Framework& framework) {
  return framework.graphs && strategy.graphs && strategy.layout.ep == 1 &&
         !strategy.offload_optimizer && !strategy.offload_activations &&
         std::ranges::none_of(cluster.groups, [](const auto& group) {
           return group.node.device.processor;
         });
}

double launch_seconds(
    const Operations& operations, const cluster::Device& device,
    const Framework& framework) {
  double launches = 0, measured = 0;
  for (const Operation& operation : operations) {
    const double own = operation.times * as_double(operation.launches);
    launches += own;
    if (operation.counted && operation.launches == 0) {
      launches += operation.times * kViewLaunches;
    }
    if (device.launch_rates.empty()) continue;
    measured += own * measured_launch_seconds(
                          device, {.backward = operation.backward,
                                   .view = is_view(operation),
                                   .bytes_beside = operation.bytes_beside});
  }
  if (!device.launch_rates.empty()) return measured;
  return launches * (device.launch_seconds > 0 ? device.launch_seconds
                                               : framework.host_seconds);
}

double matrix_seconds(
    int64_t m, int64_t n, int64_t k, cluster::Precision precision,
    const cluster::Device& device, const DeviceRates& rates, int64_t count,
    bool one_weight) {
  const double rows = as_double(m), columns = as_double(n);
  const double depth = as_double(k), many = as_double(count);
  const double flops = 2 * rows * columns * depth * many;
  if (flops <= 0) return 0;
  if (device.measured()) {
    const auto measured = measured_product_seconds(
        device, cluster::ProductKind::product, precision, rows, columns, depth,
        many);
    if (measured) return *measured;
  }
  const double peak = peak_of(device, precision) * share_of(precision, rates);
  const double compute =
      flops / (peak * tile_share(m, n, count, rates) * alignment_share(n, k));
  const double weights = (one_weight ? 1 : many) * columns;
  const double bytes =
      operand_bytes(precision) * depth * (many * rows + weights) +
      output_bytes(precision) * many * rows * columns;
  return rates.launch_seconds +
         roofline(compute, memory_seconds(bytes, device, rates), rates);
}

double memory_seconds(
    double bytes, const cluster::Device& device, const DeviceRates& rates) {
  // The output of the operator before may still be in the cache.
  const double cached = rates.cache_bytes / (rates.cache_bytes + bytes);
  return bytes / (device.memory_bytes_per_second * rates.memory_share *
                  (1 + (rates.cache_speedup - 1) * cached));
}

namespace {

double seconds_of_one(
    const Operation& operation, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t rank) {
  const cluster::Node& node = cluster.node_of(rank);
  const DeviceRates& rates = rates_of(node.device);
  const Framework& framework = find_framework(strategy.framework);
  const cluster::Precision precision =
      operation.wide ? wide(strategy.precision) : strategy.precision;
  if (node.device.measured()) {
    if (const auto seconds =
            measured_seconds(operation, precision, node.device)) {
      return *seconds;
    }
  }
  const double launches = as_double(operation.launches) * rates.launch_seconds;
  switch (operation.kind) {
    case OperationKind::matrix:
      if (is_attention(operation)) {
        return launches +
               attention_seconds(
                   operation, strategy, node.device, rates, framework) /
                   framework.compute_share;
      }
      return matrix_seconds(
                 operation.m, operation.n, operation.k, precision, node.device,
                 rates, operation.count, operation.one_weight) /
             (framework.compute_share * operation.share);
    case OperationKind::attention:
      return rates.launch_seconds +
             attention_seconds(
                 operation, strategy, node.device, rates, framework) /
                 framework.compute_share;
    case OperationKind::memory:
      return launches + memory_seconds(operation.bytes, node.device, rates) /
                            framework.memory_share;
    case OperationKind::collective:
      return collective_seconds(
          operation.collective, operation.bytes,
          operation.members > 0
              ? place_of_part(
                    strategy, cluster, operation.axis, operation.members,
                    operation.apart, rank)
              : place_of(strategy, cluster, operation.axis, rank),
          node, cluster, framework);
  }
  return 0;
}

}  // namespace

double operation_seconds(
    const Operation& operation, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t rank) {
  return operation.times * seconds_of_one(operation, strategy, cluster, rank);
}

double hidden_seconds(
    const Operation& operation, const Strategy& strategy,
    const cluster::Cluster& cluster, int64_t rank) {
  const double seconds = operation_seconds(operation, strategy, cluster, rank);
  Operation beside;
  if (operation.m > 0) {
    beside = operation;
    beside.kind = OperationKind::matrix;
    return std::min(
        seconds, operation_seconds(beside, strategy, cluster, rank));
  }
  if (operation.flops_beside == 0) return seconds * operation.hideable;
  beside.kind = OperationKind::attention;
  beside.flops = operation.flops_beside;
  beside.backward = operation.backward;
  beside.times = operation.times;
  return std::min(
      seconds,
      operation.hideable * operation_seconds(beside, strategy, cluster, rank));
}

double PassSeconds::total() const {
  return std::accumulate(exposed.begin(), exposed.end(), computation());
}

void PassSeconds::add(double factor, const PassSeconds& other) {
  matrix += factor * other.matrix;
  memory += factor * other.memory;
  host += factor * other.host;
  for (size_t axis = 0; axis < exposed.size(); ++axis) {
    exposed[axis] += factor * other.exposed[axis];
    communication[axis] += factor * other.communication[axis];
  }
}

PassSeconds pass_seconds(
    const Operations& operations, const Strategy& strategy,
    const cluster::Cluster& cluster, const Framework& framework, int64_t rank) {
  PassSeconds pass;
  if (operations.empty()) return pass;
  const cluster::Device& device = cluster.node_of(rank).device;
  double waits = 0;
  for (const Operation& operation : operations) {
    const double seconds =
        operation_seconds(operation, strategy, cluster, rank);
    waits += operation.host_seconds;
    switch (operation.kind) {
      case OperationKind::matrix:
      case OperationKind::attention:
        pass.matrix += seconds;
        break;
      case OperationKind::memory:
        pass.memory += seconds;
        break;
      case OperationKind::collective: {
        const size_t axis = index_of(operation.axis);
        const double hidden =
            hidden_seconds(operation, strategy, cluster, rank);
        pass.communication[axis] += seconds;
        pass.exposed[axis] += seconds - hidden;
        pass.memory += hidden * framework.overlap_slowdown;
        break;
      }
    }
  }
  const bool graph =
      waits == 0 && steps_are_graphs(strategy, cluster, framework);
  const double host = graph ? 0
                            : launch_seconds(operations, device, framework) +
                                  waits + framework.layer_host_seconds;
  // The host runs ahead of the device, also while that is in a collective. A
  // processor launches and computes one after the other.
  const double hidden = framework.launches_wait ? 0 : pass.total();
  pass.host =
      device.processor
          ? host
          : std::max(0.0, slowest_host(host, strategy, framework) - hidden);
  return pass;
}

}  // namespace echelon::cost
