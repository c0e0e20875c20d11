// The planner walks through this rank's actions and asks, for each, which rank
// holds the stage before and after it. A boundary between two ranks becomes a
// transfer; a boundary within this rank passes tensors without one.
//
// Transfers posts receives ahead of their use. Where messages have tags, a
// receive may be posted at any time. Where they do not (in_order), both sides
// post the messages of a pair in the order of their producers' turns in a
// simulated run of the schedule; pair_next_ is the first message of a pair that
// was not posted. A receive passes through: not posted; header posted, its
// shape not known; tensors posted; taken.
#include "echelon/parallel/pipeline/transfers.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "echelon/error.h"
#include "echelon/text/check.h"
#include "echelon/text/format.h"

namespace echelon::pipeline {
namespace {

struct ScheduledAction {
  Action action;
  int32_t position = 0;
  int64_t turn = -1;  // of the action in a run of the whole schedule
};

// Finds actions of a schedule. Backward and backward_input both count as "the
// backward that sends".
class ScheduleIndex {
 public:
  explicit ScheduleIndex(const Schedule& schedule) : schedule_(schedule) {
    for (const auto& actions : schedule.ranks) {
      for (size_t i = 0; i < actions.size(); ++i) {
        if (actions[i].kind == ActionKind::backward_weight) continue;
        actions_[key(actions[i])] = {actions[i], static_cast<int32_t>(i), -1};
      }
    }
    take_turns();
  }

  const ScheduledAction&
  at(bool backward, int32_t stage, const Action& wanted_by) const {
    const auto found =
        actions_.find(key(backward, stage, wanted_by.microbatch));
    if (found == actions_.end()) {
      throw ConfigError(format(
          "schedule \"{}\": {} needs the {} of stage {}, microbatch {}, which "
          "no rank computes",
          schedule_.name, to_string(wanted_by),
          backward ? "backward" : "forward", stage, wanted_by.microbatch));
    }
    return found->second;
  }

 private:
  // Simulates a run: round after round, each rank takes its next action if
  // ready.
  void take_turns() {
    std::vector<size_t> next(schedule_.ranks.size(), 0);
    int64_t turn = 0;
    for (bool any = true; any;) {
      any = false;
      for (size_t rank = 0; rank < next.size(); ++rank) {
        const auto& actions = schedule_.ranks[rank];
        if (next[rank] == actions.size()) continue;
        const Action& action = actions[next[rank]];
        if (!ready(action)) continue;
        any = true;
        ++next[rank];
        if (action.kind == ActionKind::backward_weight) continue;
        actions_.at(key(action)).turn = turn++;
      }
    }
  }

  bool ready(const Action& action) const {
    if (action.kind == ActionKind::backward_weight) return true;
    const bool backward = action.kind != ActionKind::forward;
    const int32_t stage = action.stage + (backward ? 1 : -1);
    if (stage < 0 || stage >= schedule_.num_stages()) return true;
    return at(backward, stage, action).turn >= 0;
  }

  uint64_t key(const Action& action) const {
    return key(
        action.kind != ActionKind::forward, action.stage, action.microbatch);
  }
  uint64_t key(bool backward, int32_t stage, int32_t microbatch) const {
    return (static_cast<uint64_t>(stage) << 33) |
           (static_cast<uint64_t>(microbatch) << 1) | (backward ? 1 : 0);
  }

  const Schedule& schedule_;
  std::unordered_map<uint64_t, ScheduledAction> actions_;
};

class Planner {
 public:
  Planner(const Schedule& schedule, int32_t rank)
      : schedule_(schedule), rank_(rank), index_(schedule) {
    plan_.num_microbatches = schedule.num_microbatches;
  }

  TransferPlan run() {
    for (const auto& action : schedule_.ranks[static_cast<size_t>(rank_)]) {
      add(action);
    }
    for (auto& [peer, messages] : ordered_) {
      std::sort(
          messages.begin(), messages.end(),
          [](const auto& a, const auto& b) { return a.first < b.first; });
      auto& pair = plan_.pairs[peer];
      for (const auto& [turn, message] : messages) pair.push_back(message);
    }
    std::set<int32_t> seen;
    for (auto i = plan_.actions.rbegin(); i != plan_.actions.rend(); ++i) {
      const bool weights = i->action.kind == ActionKind::backward ||
                           i->action.kind == ActionKind::backward_weight;
      i->last_backward = weights && seen.insert(i->action.stage).second;
    }
    return std::move(plan_);
  }

 private:
  void add(const Action& action) {
    PlannedAction planned{.action = action};
    if (action.kind != ActionKind::backward_weight) {
      const int32_t step = action.kind == ActionKind::forward ? 1 : -1;
      exchange(planned, action.stage - step, /*incoming=*/true);
      exchange(planned, action.stage + step, /*incoming=*/false);
    }
    plan_.actions.push_back(planned);
  }

  // Plans what `planned` takes from the neighbouring `stage`, or gives to it.
  void exchange(PlannedAction& planned, int32_t stage, bool incoming) {
    if (stage < 0 || stage >= schedule_.num_stages()) return;
    const bool backward = planned.action.kind != ActionKind::forward;
    const ScheduledAction& other = index_.at(backward, stage, planned.action);
    const int32_t peer = schedule_.rank_of_stage[static_cast<size_t>(stage)];
    if (peer == rank_) {
      (incoming ? planned.from_here : planned.to_here) = true;
      return;
    }
    const ScheduledAction& producer =
        incoming ? other
                 : index_.at(backward, planned.action.stage, planned.action);
    auto& transfers = incoming ? plan_.incoming : plan_.outgoing;
    const auto number = static_cast<int32_t>(transfers.size());
    (incoming ? planned.incoming : planned.outgoing) = number;
    transfers.push_back({producer.action, peer, other.position});
    ordered_[peer].push_back({producer.turn, {incoming, number}});
  }

  const Schedule& schedule_;
  const int32_t rank_;
  const ScheduleIndex index_;
  std::map<int32_t, std::vector<std::pair<int64_t, PairMessage>>> ordered_;
  TransferPlan plan_;
};

}  // namespace

TransferPlan plan_transfers(const Schedule& schedule, int32_t rank) {
  return Planner(schedule, rank).run();
}

Schedule forward_schedule(
    const std::vector<int32_t>& rank_of_stage, int32_t num_ranks,
    int32_t num_microbatches) {
  Schedule schedule;
  schedule.name = "forward";
  schedule.num_microbatches = num_microbatches;
  schedule.rank_of_stage = rank_of_stage;
  schedule.ranks.resize(static_cast<size_t>(num_ranks));
  // Turns do not decrease along the stages, so in the order (turn, microbatch,
  // stage) each forward comes after those that it needs.
  std::vector<int32_t> stages_seen(static_cast<size_t>(num_ranks), 0);
  std::map<int32_t, std::vector<int32_t>> stages_of_turn;
  int32_t turn = 0;
  for (int32_t stage = 0; stage < schedule.num_stages(); ++stage) {
    const auto rank = static_cast<size_t>(rank_of_stage[stage]);
    turn = std::max(turn, stages_seen[rank]++);
    stages_of_turn[turn].push_back(stage);
  }
  for (const auto& [_, stages] : stages_of_turn) {
    for (int32_t microbatch = 0; microbatch < num_microbatches; ++microbatch) {
      for (int32_t stage : stages) {
        schedule.ranks[static_cast<size_t>(rank_of_stage[stage])].push_back(
            {ActionKind::forward, stage, microbatch});
      }
    }
  }
  return schedule;
}

// ---------------------------------------------------------------- messages

Transfers::Transfers(
    const Group& group, const TransferPlan& plan, Settings settings)
    : group_(group),
      plan_(plan),
      settings_(std::move(settings)),
      receives_(plan.incoming.size()) {}

// Unique in a call, so that the order of posting does not matter.
int Transfers::tag_of(const Transfer& transfer) const {
  if (settings_.in_order) return 0;
  const int64_t tag =
      (static_cast<int64_t>(transfer.producer.stage) * plan_.num_microbatches +
       transfer.producer.microbatch) *
          2 +
      (transfer.backward() ? 1 : 0);
  if (tag >= int64_t{1} << 30) {  // tied parameters use larger tags
    throw ConfigError(format(
        "pipeline: stage {} with {} microbatches: at most 2^29 pairs of stage "
        "and microbatch are possible in a step",
        transfer.producer.stage, plan_.num_microbatches));
  }
  return static_cast<int>(tag);
}

void Transfers::post_data(const Transfer& transfer, Receive& receive) {
  receive.tensors = empty_like(receive.shape, settings_.device);
  Tensors messages;
  for (const auto& tensor : receive.tensors) {
    if (tensor.numel() == 0) continue;
    messages.push_back(in_order(tensor, tensor.strides()));
  }
  receive.work = group_.recv(
      messages, transfer.peer, tag_of(transfer),
      {.label = to_string(transfer.producer), .async = true});
}

void Transfers::post(const Transfer& transfer, Receive& receive) {
  const Expected expected = settings_.expect(transfer);
  if (expected.kind == Expected::Kind::later) return;
  receive.posted = true;
  if (expected.kind == Expected::Kind::shape) {
    receive.shape = expected.shape;
    post_data(transfer, receive);
    return;
  }
  receive.header = torch::empty(
      {kHeaderLength},
      torch::TensorOptions().dtype(torch::kInt64).device(settings_.device));
  receive.work = group_.recv(
      *receive.header, transfer.peer, tag_of(transfer),
      {.label = to_string(transfer.producer) + " shape", .async = true});
}

void Transfers::read_header(const Transfer& transfer, Receive& receive) {
  receive.work.wait();
  receive.shape = decode(*receive.header);
  receive.header.reset();
  post_data(transfer, receive);
}

// Posts the receive as far as possible without waiting: first its header, if it
// has one. Returns whether its tensors are posted.
bool Transfers::try_post(size_t index) {
  Receive& receive = receives_[index];
  if (!receive.posted) post(plan_.incoming[index], receive);
  if (receive.header && receive.work.done()) {
    read_header(plan_.incoming[index], receive);
  }
  return receive.posted && !receive.header;
}

void Transfers::advance() {
  std::erase_if(sent_, [](const Sent& sent) { return sent.work.done(); });
  const size_t end =
      std::min(receives_.size(), next_ + static_cast<size_t>(settings_.ahead));
  if (settings_.in_order) {
    post_pairs(end);
    return;
  }
  for (size_t i = next_; i < end; ++i) {
    try_post(i);
  }
}

// Posts the receives of each pair that come next and are needed before `end`.
void Transfers::post_pairs(size_t end) {
  for (const auto& [peer, messages] : plan_.pairs) {
    size_t& next = pair_next_[peer];
    for (; next < messages.size() && messages[next].incoming; ++next) {
      const auto index = static_cast<size_t>(messages[next].index);
      if (index >= end || !try_post(index)) break;
    }
  }
}

// Posts what both sides post before `message`. Waits only for headers.
void Transfers::post_before(int32_t peer, const PairMessage& message) {
  const auto& messages = plan_.pairs.at(peer);
  size_t& next = pair_next_[peer];
  for (; !(messages[next] == message); ++next) {
    const auto index = static_cast<size_t>(messages[next].index);
    ECHELON_CHECK(
        messages[next].incoming,
        "{} should have been sent before; the schedule is not in order",
        to_string(plan_.outgoing[index].producer));
    Receive& receive = receives_[index];
    if (!receive.posted) post(plan_.incoming[index], receive);
    if (receive.header) read_header(plan_.incoming[index], receive);
  }
}

Tensors Transfers::take(int32_t index, TupleShape& shape) {
  const Transfer& transfer = plan_.incoming[static_cast<size_t>(index)];
  Receive& receive = receives_[static_cast<size_t>(index)];
  advance();
  if (settings_.in_order && !receive.posted) {
    post_before(transfer.peer, {true, index});
    post(transfer, receive);
  }
  if (receive.header || !receive.work.done()) {
    timeline::ScopedSpan span(
        settings_.recorder, "compute", "wait " + to_string(transfer.producer),
        timeline::SpanKind::communication);
    if (receive.header) read_header(transfer, receive);
    receive.work.wait();
  }
  receive.work.wait();
  release_sent(transfer);
  shape = std::move(receive.shape);
  Tensors tensors = std::move(receive.tensors);
  next_ = static_cast<size_t>(index) + 1;
  advance();
  return tensors;
}

void Transfers::send(
    int32_t index, const Tensors& tensors, const TupleShape& shape,
    bool headed) {
  const Transfer& transfer = plan_.outgoing[static_cast<size_t>(index)];
  if (settings_.in_order) {
    post_before(transfer.peer, {false, index});
    ++pair_next_[transfer.peer];
  }
  const std::string label = to_string(transfer.producer);
  const auto keep = [&](Work work) {
    sent_.push_back(
        {transfer.peer, transfer.position_at_peer, std::move(work)});
  };
  if (headed) {  // in a call of its own, as it is received
    keep(group_.send(
        encode(shape).to(settings_.device), transfer.peer, tag_of(transfer),
        {.label = label + " shape", .async = true}));
  }
  Tensors messages;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    messages.push_back(in_order(tensors[i], shape[i].strides));
  }
  if (messages.empty()) return;
  keep(group_.send(
      messages, transfer.peer, tag_of(transfer),
      {.label = label, .async = true}));
}

// Frees the tensors of sends that are known to be complete: the peer needed
// them to compute what has just arrived, so wait() returns at once. Not every
// backend notices by itself that a send is complete.
void Transfers::release_sent(const Transfer& arrived) {
  sent_.remove_if([&](const Sent& sent) {
    if (sent.peer != arrived.peer ||
        sent.position_at_peer > arrived.position_at_peer) {
      return false;
    }
    sent.work.wait();
    return true;
  });
}

void Transfers::finish() {
  for (const auto& sent : sent_) sent.work.wait();
  sent_.clear();
}

}  // namespace echelon::pipeline
