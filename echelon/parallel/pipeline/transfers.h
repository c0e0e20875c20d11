// The messages of a pipeline: planned from a schedule before anything runs,
// then sent and received during each call. Receives are posted before they are
// needed, and sends run while the next microbatch computes.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/pipeline/tuple_shape.h"
#include "echelon/schedule/schedule.h"
#include "echelon/timeline/recorder.h"

namespace echelon::pipeline {

/// A tuple of tensors that `producer` computed, sent from one rank to another.
struct Transfer {
  Action producer;
  int32_t peer = 0;              // the other pipeline rank
  int32_t position_at_peer = 0;  // in the peer's list of actions
  bool backward() const { return producer.kind != ActionKind::forward; }
};

struct PlannedAction {
  Action action;
  /// Index into TransferPlan::incoming; -1: nothing arrives.
  int32_t incoming = -1;
  /// Index into TransferPlan::outgoing; -1: nothing leaves this rank.
  int32_t outgoing = -1;
  /// Whether the stages that its input comes from, and that its result goes to,
  /// are on this rank.
  bool from_here = false;
  bool to_here = false;
  /// No later action computes gradients of this stage's weights.
  bool last_backward = false;
};

/// A message between this rank and one peer.
struct PairMessage {
  bool incoming = false;
  int32_t index = 0;  // into TransferPlan::incoming or outgoing
  bool operator==(const PairMessage&) const = default;
};

struct TransferPlan {
  int32_t num_microbatches = 0;
  std::vector<PlannedAction> actions;
  std::vector<Transfer> incoming;  // in the order in which they are needed
  std::vector<Transfer> outgoing;  // in the order in which they are made
  /// By peer, the messages of both directions in an order that both sides
  /// share: that of their producers in a run of the whole schedule. Posting in
  /// this order cannot deadlock: no message waits for a later one.
  std::map<int32_t, std::vector<PairMessage>> pairs;
};

/// Plans what `rank` computes, sends and receives. Throws ConfigError when an
/// action needs the result of one that is missing.
TransferPlan plan_transfers(const Schedule& schedule, int32_t rank);

/// A schedule of forward passes alone, for evaluation. Its order (stages in
/// turns of the ranks, then microbatches) cannot deadlock for any placement of
/// the stages.
Schedule forward_schedule(
    const std::vector<int32_t>& rank_of_stage, int32_t num_ranks,
    int32_t num_microbatches);

/// What is known of a tuple that will arrive.
struct Expected {
  enum class Kind {
    later,   // not known yet: ask again
    shape,   // it is `shape`
    headed,  // a header with its shape comes first
  };
  Kind kind = Kind::later;
  TupleShape shape;
};

class Transfers {
 public:
  struct Settings {
    torch::Device device = torch::kCPU;
    timeline::Recorder* recorder = nullptr;
    /// Receives that may be posted at the same time: the one that is needed
    /// next, and those that arrive during its computation.
    int32_t ahead = 2;
    /// Match messages by their order instead of by tags: both sides post them
    /// in the order of plan.pairs. (NCCL knows no tags, and each message of a
    /// pair of ranks waits for the previous one.)
    bool in_order = false;
    std::function<Expected(const Transfer&)> expect;
  };
  Transfers(const Group& group, const TransferPlan& plan, Settings settings);

  /// Posts receives without waiting; call it often.
  void advance();
  /// Waits for the tuple of plan.incoming[index]. Call in the order of the
  /// indices.
  Tensors take(int32_t index, TupleShape& shape);
  /// Sends plan.outgoing[index] with the strides of `shape`, which the peer
  /// knows. `headed`: the peer does not know it yet, so a header is sent first.
  void send(
      int32_t index, const Tensors& tensors, const TupleShape& shape,
      bool headed);
  /// Waits until everything that was sent has arrived.
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
  bool try_post(size_t index);
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
  size_t next_ = 0;                      // the receive to be taken next
  std::map<int32_t, size_t> pair_next_;  // by peer, if in_order: next to post
  std::list<Sent> sent_;
};

}  // namespace echelon::pipeline
