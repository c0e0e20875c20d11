// The messages of one call of the pipeline. Receives are posted before they are
// needed, sends run while the next microbatch computes.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/pipeline/transfer_plan.h"
#include "echelon/parallel/pipeline/tuple_shape.h"
#include "echelon/timeline/recorder.h"

namespace echelon::pipeline {

/// What is known of a tuple that will arrive.
struct Expected {
  enum class Kind {
    later,   // ask again
    shape,   // `shape`
    headed,  // a header comes before it
  };
  Kind kind = Kind::later;
  TupleShape shape;
};

class Transfers {
 public:
  struct Settings {
    torch::Device device = torch::kCPU;
    Recorder* recorder = nullptr;
    /// Receives that may be posted at a time: the one that is needed next, and
    /// those that arrive while it is computed on.
    int32_t ahead = 2;
    /// Messages match by their order instead of by tags (NCCL knows no tags,
    /// and each message of a pair of ranks waits for the one before it): both
    /// sides post them in the order of plan.pairs.
    bool in_order = false;
    std::function<Expected(const Transfer&)> expect;
  };
  Transfers(const Group& group, const TransferPlan& plan, Settings settings);

  /// Posts receives; to be called often. Never waits.
  void advance();
  /// The tuple of plan.incoming[index], taken in that order.
  Tensors take(int32_t index, TupleShape& shape);
  /// Sends as plan.outgoing[index], with the strides of `shape`, which is what
  /// the peer knows of the tuple; `headed`: not yet, a header comes before it.
  void send(
      int32_t index, const Tensors& tensors, const TupleShape& shape,
      bool headed);
  /// Returns when all that was sent has arrived.
  void finish();

 private:
  struct Receive {
    bool posted = false;
    bool headed = false;
    std::optional<torch::Tensor> header;  // until it is read
    TupleShape shape;
    Tensors tensors;
    Work work;
  };
  struct Sent {
    int32_t peer = 0;
    int32_t position_at_peer = 0;
    Work work;
  };

  void post(const Transfer& transfer, Receive& receive);
  void post_pairs(size_t end);
  void post_before(int32_t peer, const PairMessage& message);
  void post_data(const Transfer& transfer, Receive& receive);
  void read_header(const Transfer& transfer, Receive& receive);
  void release_sent(const Transfer& arrived);
  int tag_of(const Transfer& transfer) const;

  const Group& group_;
  const TransferPlan& plan_;
  const Settings settings_;
  std::vector<Receive> receives_;
  size_t next_ = 0;                      // receive to be taken
  std::map<int32_t, size_t> pair_next_;  // in_order: to be posted, by peer
  std::list<Sent> sent_;
};

}  // namespace echelon::pipeline
