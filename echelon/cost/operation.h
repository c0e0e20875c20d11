// What a device does in one pass through one layer, as a list: the cost
// formulas and the simulator share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/layout/layout.h"

namespace echelon::cost {

/// The number of an axis in arrays by axis (kAxes).
constexpr size_t index_of(Axis axis) {
  return static_cast<size_t>(axis);
}

enum class OperationKind {
  matrix,      // `count` matmuls of [m, k] and [k, n]
  attention,   // fused or not: `flops`, `bytes`
  memory,      // bound by memory bandwidth: `bytes` read and written
  collective,  // among the ranks of `axis`
};

enum class CollectiveKind {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  send
};
/// "all_reduce".
std::string_view to_string(CollectiveKind kind);
/// Empty for another word.
std::optional<CollectiveKind> collective_kind(std::string_view name);

struct Operation {
  OperationKind kind = OperationKind::memory;
  std::string name;      // "attention projection"
  int64_t count = 1;     // matrix: equal matmuls in one (batched, grouped)
  int64_t launches = 1;  // kernels that the host launches for it
  /// Matrix. Collective: with `count` the matmul that runs meanwhile and may
  /// hide it; m = 0: none.
  int64_t m = 0, n = 0, k = 0;
  bool one_weight = false;  // all `count` matmuls have the same [k, n]
  cluster::ProductKind product =
      cluster::ProductKind::product;  // matrix: what computes it
  double share = 1;                   // matrix: of the rate of one large matmul
  double bytes_beside = 0;  // counted: average that its neighbours move
  double times = 1;        // per pass, on average: not all microbatches have it
  double bytes_since = 0;  // counted: since 2/3 of `bytes` were used last
  double host_seconds = 0;  // the host waits for a result, in addition
  bool wide = false;        // matrix: in 16 bit where the strategy's are not
  double flops = 0;         // attention; of matrices all of the 2 m n k
  double flops_beside = 0;  // collective: of attention that may hide it
  double bytes = 0;         // memory: moved; collective: of the whole tensor
  bool backward = false;    // attention: in backward; counted: of a gradient
  bool counted = false;     // as it ran, not by a formula
  CollectiveKind collective = CollectiveKind::all_reduce;
  Axis axis = Axis::tp;
  /// Where not all ranks of the axis take part: how many do, and how far apart
  /// they are along it.
  int64_t members = 0;
  int64_t apart = 1;
  /// The share of a collective that computation of the same pass can hide,
  /// where no matmul is said. With flops_beside: the share of that computation
  /// that can hide it.
  double hideable = 0;
};

/// Whether it is launched but computes nothing.
inline bool is_view(const Operation& operation) {
  return operation.kind == OperationKind::memory && operation.bytes == 0;
}

/// Whether it is attention, counted as its scores.
inline bool is_attention(const Operation& operation) {
  return operation.kind == OperationKind::matrix &&
         (operation.product == cluster::ProductKind::attention ||
          operation.product == cluster::ProductKind::attention_gradients);
}

/// A copy-on-write list: a search copies layers into stages many thousand times
/// and changes none.
class Operations {
 public:
  bool empty() const { return size() == 0; }
  size_t size() const { return list_ ? list_->size() : 0; }
  const Operation* begin() const { return list_ ? list_->data() : nullptr; }
  const Operation* end() const { return begin() + size(); }
  const Operation& operator[](size_t at) const { return (*list_)[at]; }

  void push_back(Operation operation) {
    change().push_back(std::move(operation));
  }
  const Operation& back() const { return list_->back(); }
  Operation& back() { return change().back(); }
  void clear() { list_.reset(); }

  /// For changes: no longer shared.
  std::vector<Operation>& change() {
    if (!list_) {
      list_ = std::make_shared<std::vector<Operation>>();
    } else if (list_.use_count() > 1) {
      list_ = std::make_shared<std::vector<Operation>>(*list_);
    }
    return *list_;
  }

 private:
  std::shared_ptr<std::vector<Operation>> list_;
};

/// One layer on one rank, for one microbatch.
struct LayerWork {
  std::string name;    // "block", "embedding", "head"
  int64_t repeat = 1;  // equal consecutive layers
  int64_t kind = 0;    // layers of one kind differ at most in `again`
  int64_t stage = -1;  // for which it was counted (CountedLayer)
  Operations forward;
  Operations backward_input;     // gradients of inputs
  Operations backward_weight;    // gradients of weights
  Operations again;              // recompute before backward
  double parameters = 0;         // elements on this rank, before ZeRO
  double expert_parameters = 0;  // of these, elements of experts
  double output_bytes = 0;       // sent to the next stage
};

/// Elements of parameters, by how they are replicated.
struct Elements {
  double dense = 0;
  double experts = 0;

  Elements& operator+=(const Elements& more) {
    dense += more.dense;
    experts += more.experts;
    return *this;
  }
};
inline Elements operator*(double factor, const Elements& one) {
  return {factor * one.dense, factor * one.experts};
}

/// The parameters of one layer.
inline Elements elements_of(const LayerWork& layer) {
  return {layer.parameters - layer.expert_parameters, layer.expert_parameters};
}

}  // namespace echelon::cost
