// What one rank computes, and which messages that means: read off a schedule
// once, before anything runs.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon::pipeline {

/// A tuple of tensors from one rank to another: what `producer` made.
struct Transfer {
  Action producer;
  int32_t peer = 0;              // the other pipeline rank
  int32_t position_at_peer = 0;  // of the peer's action in its list
  bool backward() const { return producer.kind != ActionKind::forward; }
};

struct PlannedAction {
  Action action;
  /// Index into TransferPlan::incoming; -1: nothing arrives.
  int32_t incoming = -1;
  /// Index into TransferPlan::outgoing; -1: nothing leaves this rank.
  int32_t outgoing = -1;
  /// The stage before (or, backwards, after) is on this rank as well.
  bool from_here = false;
  bool to_here = false;
  /// No later action gives gradients to this stage's weights.
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
  /// share: that of their producers in one run of the whole schedule. Who posts
  /// in this order never waits for a message that waits for a later one.
  std::map<int32_t, std::vector<PairMessage>> pairs;
};

/// Throws ConfigError when an action that another one takes from is missing.
TransferPlan plan_transfers(const Schedule& schedule, int32_t rank);

/// Forwards alone, for evaluation, in an order that no placement of the stages
/// can bring to a halt: stages by turns of the ranks, then microbatches.
Schedule forward_schedule(
    const std::vector<int32_t>& rank_of_stage, int32_t num_ranks,
    int32_t num_microbatches);

}  // namespace echelon::pipeline
