// What a device does in one pass through one layer, as a list: the common
// language of cost formulas and simulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/layout/layout.h"

namespace echelon {

enum class OperationKind {
  matrix,      // count products of [m, k] and [k, n]
  attention,   // fused or not: `flops`, `bytes`
  memory,      // bound by the memory's rate: `bytes` read and written
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

struct Operation {
  OperationKind kind = OperationKind::memory;
  std::string name;  // "attention projection"
  int64_t count =
      1;  // matrix: equal products that run together (batched, grouped)
  int64_t launches = 1;         // kernels that the host starts for it
  int64_t m = 0, n = 0, k = 0;  // matrix
  ProductKind product = ProductKind::product;  // matrix: what computes it
  double share = 1;  // matrix: of the rate that one large product reaches
  double bytes_beside =
      0;             // counted: that operators of its network move, on average
  double times = 1;  // of a pass, on average: not every microbatch's has it
  double bytes_since =
      0;  // counted: moved since two thirds of `bytes` were used last
  double host_seconds = 0;  // beside launches: the host waits for a result
  bool wide =
      false;  // matrix: in 16 bit, even where the strategy's are in 8 or 4
  double flops = 0;  // attention; of matrices count * 2 m n k
  double bytes = 0;  // memory: moved; collective: of the whole tensor
  bool ends_pass =
      false;  // the loss: the host's work of a microbatch is beside it
  bool backward =
      false;  // attention: its backward products; counted: of a gradient
  CollectiveKind collective = CollectiveKind::all_reduce;
  Axis axis = Axis::tp;
  /// A collective that computation of the same pass may hide (asynchronous
  /// tensor parallelism): the part of it that can.
  double hideable = 0;
};

/// It is launched, and computes nothing.
inline bool is_view(const Operation& operation) {
  return operation.kind == OperationKind::memory && operation.bytes == 0;
}

/// A list that copies share until one of them changes: a search copies layers
/// into stages many thousand times and changes none.
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

  /// To be changed: no other's any more.
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
  int64_t repeat = 1;  // consecutive layers that are alike
  int64_t kind = 0;    // layers of one number are alike, but for `again`
  int64_t stage = -1;  // that it was counted for (CountedLayer)
  Operations forward;
  Operations backward_input;     // gradients of inputs
  Operations backward_weight;    // gradients of weights
  Operations again;              // what recompute does before backward
  double parameters = 0;         // elements on this rank, before ZeRO
  double expert_parameters = 0;  // of those, experts (their gradients are
                                 // summed over other ranks)
  double output_bytes = 0;       // that goes to the next stage
};

}  // namespace echelon
