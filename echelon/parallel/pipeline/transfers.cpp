#include "echelon/parallel/pipeline/transfers.h"

#include <algorithm>

#include "echelon/error.h"

namespace echelon::pipeline {

Transfers::Transfers(
    const Group& group, const TransferPlan& plan, Settings settings)
    : group_(group),
      plan_(plan),
      settings_(std::move(settings)),
      receives_(plan.incoming.size()) {}

// One of a kind in a call, so that the order of posting does not matter.
int Transfers::tag_of(const Transfer& transfer) const {
  if (settings_.in_order) return 0;
  const int64_t tag =
      (static_cast<int64_t>(transfer.producer.stage) * plan_.num_microbatches +
       transfer.producer.microbatch) *
          2 +
      (transfer.backward() ? 1 : 0);
  if (tag >= int64_t{1} << 30) {  // tied parameters use those above
    throw ConfigError(
        "pipeline: stage " + std::to_string(transfer.producer.stage) +
        " with " + std::to_string(plan_.num_microbatches) +
        " microbatches: at most 2^29 pairs of stage and microbatch are "
        "possible in a step");
  }
  return static_cast<int>(tag);
}

void Transfers::post_data(const Transfer& transfer, Receive& receive) {
  receive.tensors = empty_like(receive.shape, settings_.device);
  std::vector<PeerMessage> messages;
  for (const auto& tensor : receive.tensors) {
    if (tensor.numel() == 0) continue;
    messages.push_back(
        {.send = false,
         .tensor = in_order(tensor, tensor.strides()),
         .peer = transfer.peer,
         .tag = tag_of(transfer)});
  }
  receive.work = group_.batch_send_recv(
      messages, {.label = to_string(transfer.producer), .async = true});
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

void Transfers::advance() {
  std::erase_if(sent_, [](const Sent& sent) { return sent.work.done(); });
  const size_t end =
      std::min(receives_.size(), next_ + static_cast<size_t>(settings_.ahead));
  if (settings_.in_order) {
    post_pairs(end);
    return;
  }
  for (size_t i = next_; i < end; ++i) {
    Receive& receive = receives_[i];
    if (!receive.posted) post(plan_.incoming[i], receive);
    if (receive.header && receive.work.done()) {
      read_header(plan_.incoming[i], receive);
    }
  }
}

// Of each pair, receives that come next and are needed before `end`.
void Transfers::post_pairs(size_t end) {
  for (const auto& [peer, messages] : plan_.pairs) {
    size_t& next = pair_next_[peer];
    for (; next < messages.size() && messages[next].incoming; ++next) {
      const auto index = static_cast<size_t>(messages[next].index);
      if (index >= end) break;
      Receive& receive = receives_[index];
      if (!receive.posted) post(plan_.incoming[index], receive);
      if (receive.header && receive.work.done()) {
        read_header(plan_.incoming[index], receive);
      }
      if (!receive.posted || receive.header) break;
    }
  }
}

// Posts what both sides post before `message`; waits for headers at most.
void Transfers::post_before(int32_t peer, const PairMessage& message) {
  const auto& messages = plan_.pairs.at(peer);
  size_t& next = pair_next_[peer];
  for (; !(messages[next] == message); ++next) {
    const auto index = static_cast<size_t>(messages[next].index);
    if (!messages[next].incoming) {
      throw Error(
          "pipeline: " + to_string(plan_.outgoing[index].producer) +
          " should have been sent before; the schedule is not in order");
    }
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
    ScopedSpan span(
        settings_.recorder, "compute", "wait " + to_string(transfer.producer),
        SpanKind::communication);
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
  if (headed) {  // apart from the rest, as it is received
    keep(group_.send(
        encode(shape).to(settings_.device), transfer.peer, tag_of(transfer),
        {.label = label + " shape", .async = true}));
  }
  std::vector<PeerMessage> messages;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    messages.push_back(
        {.tensor = in_order(tensors[i], shape[i].strides),
         .peer = transfer.peer,
         .tag = tag_of(transfer)});
  }
  if (messages.empty()) return;
  keep(group_.batch_send_recv(messages, {.label = label, .async = true}));
}

// What the peer needed before it made what has just arrived has arrived there:
// wait() returns at once, and frees the tensors. Not every backend knows by
// itself that a send is over.
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
