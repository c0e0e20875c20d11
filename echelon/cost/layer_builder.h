// Builds one layer's operations: each call adds what one part of the layer does
// in forward, for the gradients of inputs and for those of weights.
#pragma once

#include <algorithm>
#include <string>

#include "echelon/cost/framework.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

/// The chunks that the matmuls of a linear layer are made in, one after the
/// other, each as `batches` matmuls of equally many rows.
struct ProductChunks {
  int64_t forward = 1, backward = 1;
  int64_t batches = 1;
};

class LayerBuilder {
 public:
  LayerBuilder(
      std::string name, const Strategy& strategy, const Framework& framework);

  /// `count` matmuls of activations [rows, inner] and weights [inner, columns].
  void linear(
      const std::string& name, int64_t rows, int64_t columns, int64_t inner,
      bool bias, int64_t count = 1, bool expert = false,
      const ProductChunks& chunks = {});
  /// `count` matmuls of two activations, [m, k] and [k, n].
  void product(
      const std::string& name, int64_t count, int64_t m, int64_t n, int64_t k);
  /// Fused attention: forward FLOPs, elements of queries, keys, values,
  /// outputs.
  void fused_attention(double flops, double elements);
  /// An operator bound by memory: how often it moves `elements` in forward and
  /// backward, and with how many kernels.
  void stream(
      const std::string& name, double elements, double forward_moves,
      double backward_moves, int64_t forward_launches = 1,
      int64_t backward_launches = 1);
  /// An operator of forward, or of backward, that reads and writes `elements`
  /// twice.
  void copy(const std::string& name, double elements, bool forward);
  /// An operator for gradients of weights that reads and writes `elements`.
  void reorder(const std::string& name, double elements, int64_t launches);
  /// The host waits for the operation that was added last.
  void wait_for_host(double forward_seconds, double backward_seconds);
  /// Weights that are not of matmuls: scales, tables.
  void parameters(double elements, int64_t tensors);
  /// A collective in forward, and its counterpart in backward.
  void collective(
      const std::string& name, Axis axis, CollectiveKind kind, double bytes,
      double hidden, bool forward);
  /// The same of an operation with its axis, kind, bytes and what hides it.
  void collective(const std::string& name, Operation operation, bool forward);
  /// A collective of tp in forward or backward that runs beside a matmul
  /// [m, k] x [k, n] of a rank: as a whole beside another's (chunks = 0), or
  /// beside its own, each chunk but one while another chunk is computed.
  struct Beside {
    int64_t m = 0, n = 0, k = 0;
    int64_t chunks = 0;
    int64_t batches = 1;
  };
  void collective_beside(
      const std::string& name, CollectiveKind kind, double bytes,
      const Beside& product, bool forward);
  /// The range that selective recompute computes again.
  void begin_selective() { selective_begin_ = work_.forward.size(); }
  void end_selective() { selective_end_ = work_.forward.size(); }

  double element_bytes() const { return element_bytes_; }
  /// Of an element in which attention sums.
  double sum_bytes() const { return std::max(4.0, element_bytes_); }
  /// The layer, with what the strategy recomputes in backward.
  LayerWork finish(double output_elements);

  /// Keeps the layer's matmuls in 16 bit, even where the strategy has them
  /// in 8. Called first.
  void stay_in_16_bit() { wide_ = true; }

 private:
  bool in_8_bits() const {
    return !wide_ && (strategy_.precision == cluster::Precision::fp8 ||
                      strategy_.precision == cluster::Precision::fp4);
  }
  void quantise(
      const std::string& name, double rows, double inner, double columns,
      int64_t tensors);

  LayerWork work_;
  bool wide_ = false;
  const Strategy& strategy_;
  const Framework& framework_;
  double element_bytes_ = 2;
  size_t selective_begin_ = 0, selective_end_ = 0;
};

}  // namespace echelon::cost
