// Messages between two ranks of a Group.
#include <algorithm>
#include <optional>
#include <utility>

#include "echelon/comm/group_call.h"
#include "echelon/comm/trace/record.h"

namespace echelon {
namespace {

using detail::Checks;
using detail::WorkPtr;
using torch::Tensor;

/// Messages that start together. One that throws leaves the batch closed all
/// the same: an open one would take in every later call of the thread.
class Batch {
 public:
  explicit Batch(c10d::Backend& backend) : backend_(&backend) {
    backend.startCoalescing();
  }
  ~Batch() {
    if (backend_ == nullptr) return;
    try {
      backend_->endCoalescing();
    } catch (const std::exception&) {
      // The message's own error is on its way.
    }
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  WorkPtr end() { return std::exchange(backend_, nullptr)->endCoalescing(); }

 private:
  c10d::Backend* backend_;
};

/// `together`: as one batch. NCCL's batches run on the group's communicator and
/// stream; other messages on the pair's, each after the one before. The other
/// backends never block here.
Work exchange(
    const Group::Impl& group, std::vector<PeerMessage> messages,
    const Call& call, bool together) {
  std::vector<Tensor> all;
  for (const auto& message : messages) {
    const Checks check(group, message.send ? "send" : "recv");
    check.tensor(message.tensor);
    check.peer(message.peer);
    if (message.tag < 0) {
      check.refuse("tag {} must be 0 or more", message.tag);
    }
    all.push_back(message.tensor);
  }
  if (all.empty() || Checks(group, "batch_send_recv").no_data(all)) return {};
  // NCCL has no tags: a pair's messages meet in their order.
  std::stable_sort(
      messages.begin(), messages.end(),
      [](const auto& a, const auto& b) { return a.tag < b.tag; });
  const LabelScope label(detail::label_of(call));
  std::optional<Batch> batch;
  if (together && group.kind == BackendKind::nccl) {
    batch.emplace(*group.backend);
  }
  std::vector<WorkPtr> works;
  for (const auto& message : messages) {
    std::vector<Tensor> tensors = {detail::movable(group, message.tensor)};
    works.push_back(
        message.send ? group.backend->send(tensors, message.peer, message.tag)
                     : group.backend->recv(tensors, message.peer, message.tag));
  }
  if (batch) works = {batch->end()};
  return detail::finish(std::move(works), call);
}

}  // namespace

Work Group::send(
    const Tensor& tensor, int destination, int tag, const Call& call) const {
  return send(std::vector<Tensor>{tensor}, destination, tag, call);
}

Work Group::recv(
    const Tensor& tensor, int source, int tag, const Call& call) const {
  return recv(std::vector<Tensor>{tensor}, source, tag, call);
}

Work Group::send(
    const std::vector<Tensor>& tensors, int destination, int tag,
    const Call& call) const {
  std::vector<PeerMessage> messages;
  for (const auto& tensor : tensors) {
    messages.push_back({true, tensor, destination, tag});
  }
  return exchange(*impl_, messages, call, /*together=*/false);
}

Work Group::recv(
    const std::vector<Tensor>& tensors, int source, int tag,
    const Call& call) const {
  std::vector<PeerMessage> messages;
  for (const auto& tensor : tensors) {
    messages.push_back({false, tensor, source, tag});
  }
  return exchange(*impl_, messages, call, /*together=*/false);
}

void Group::connect_peers(const std::vector<int>& peers) const {
  if (impl_->kind != BackendKind::nccl || !impl_->backend) return;
  std::vector<std::pair<int, int>> pairs;
  for (const int peer : peers) {
    Checks(*impl_, "connect_peers").peer(peer);
    pairs.push_back(std::minmax(rank(), peer));
  }
  std::sort(pairs.begin(), pairs.end());
  const Tensor message =
      torch::zeros({1}, torch::dtype(torch::kByte).device(impl_->device));
  for (const auto& [first, second] : pairs) {
    if (rank() == first) {
      send(message, second, 0, {.label = "connect"});
    } else {
      recv(message, first, 0, {.label = "connect"});
    }
  }
}

Work Group::batch_send_recv(
    const std::vector<PeerMessage>& messages, const Call& call) const {
  return exchange(*impl_, messages, call, /*together=*/true);
}

}  // namespace echelon
