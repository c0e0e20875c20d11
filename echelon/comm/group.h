// The communicator along one mesh axis, and its plain collectives. Collectives
// that autograd differentiates are in differentiable.h.
#pragma once

#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

namespace echelon {

enum class ReduceOp { sum, avg, min, max };

/// The handle of a collective that may still be running; what an asynchronous
/// collective returns. Copies share one operation. The operation itself keeps
/// the tensors of the call alive.
class Work {
 public:
  /// A finished operation.
  Work() = default;

  /// Returns when the result is in the tensors (on a GPU: when the current
  /// stream waits for it). Throws CommError when a peer was lost, ranks called
  /// different things, or the group's timeout passed. May be called again.
  void wait() const;

  /// True once wait() would return at once.
  bool done() const;

  struct Impl;
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// How one call is made. `label` names its purpose ("bucket 0") in the timeline
/// and in every error; all ranks of a collective give the same one.
struct Call {
  std::string label;
  bool async = false;  // return at once; the caller waits on the Work
};

/// One message of a batch: `send` true sends `tensor` to `peer`.
struct PeerMessage {
  bool send = true;
  torch::Tensor tensor;
  int peer = 0;
  int tag = 0;
};

/// A communicator. Every rank of the group makes the same calls in the same
/// order; send and recv are made by the two peers alone. Tensors are contiguous
/// and on the world's device. A group of size 1 costs nothing: results are the
/// inputs. Copies share the communicator. One thread of a rank calls at a time.
///
/// Tensors on the meta device have shapes and no values: a call checks its
/// arguments and returns. Nothing is sent, waited for or recorded in the
/// history, and the other ranks need not call, so any rank alone can count the
/// cost of layers that communicate (counting/layer_cost.h).
///
/// All calls throw ConfigError for arguments that are wrong on this rank alone
/// (before anything is sent) and CommError as Work::wait does. After a
/// CommError the group cannot be used.
class Group {
 public:
  /// A group of this rank alone, without a World.
  static Group alone(const std::string& axis);
  /// Rank `rank` of a group of `size` ranks that sends nothing: calls check
  /// their arguments and return at once, and outputs keep their values. For
  /// measuring a computation without its communication.
  static Group silent(const std::string& axis, int rank, int size);

  int rank() const;  // in [0, size)
  int size() const;
  const std::string& axis() const;        // "world", "dp_replicate", …
  const std::vector<int>& ranks() const;  // world ranks, by group rank

  /// tensor [*] <- reduction over the group, in place.
  Work all_reduce(
      const torch::Tensor& tensor, ReduceOp op = ReduceOp::sum,
      const Call& call = {}) const {
    return all_reduce(std::vector<torch::Tensor>{tensor}, op, call);
  }
  /// output [size * numel(input)], in rank order, <- every rank's input.
  Work all_gather(
      const torch::Tensor& output, const torch::Tensor& input,
      const Call& call = {}) const {
    return all_gather(std::vector<torch::Tensor>{output}, {input}, call);
  }
  /// output [numel(input) / size] <- this rank's slice of the reduction.
  Work reduce_scatter(
      const torch::Tensor& output, const torch::Tensor& input,
      ReduceOp op = ReduceOp::sum, const Call& call = {}) const {
    return reduce_scatter(
        std::vector<torch::Tensor>{output}, {input}, op, call);
  }
  /// Slice i of input goes to rank i; slice j of output comes from rank j. The
  /// slices are along dim 0, equal or of the given sizes.
  Work all_to_all(
      const torch::Tensor& output, const torch::Tensor& input,
      const std::vector<int64_t>& output_splits = {},
      const std::vector<int64_t>& input_splits = {},
      const Call& call = {}) const;
  /// tensor <- the tensor of group rank `source`.
  Work broadcast(
      const torch::Tensor& tensor, int source, const Call& call = {}) const;
  /// tensor of `destination` <- reduction; on other ranks it is unspecified.
  Work reduce(
      const torch::Tensor& tensor, int destination, ReduceOp op = ReduceOp::sum,
      const Call& call = {}) const;
  /// outputs (one per rank, on `destination` alone; empty elsewhere) <- inputs.
  Work gather(
      const std::vector<torch::Tensor>& outputs, const torch::Tensor& input,
      int destination, const Call& call = {}) const;
  /// output <- inputs[rank] of `source` (empty elsewhere).
  Work scatter(
      const torch::Tensor& output, const std::vector<torch::Tensor>& inputs,
      int source, const Call& call = {}) const;

  /// NCCL has no tags: the messages from one rank to another meet in the order
  /// of the calls, and within a batch in the order of their tags.
  Work send(
      const torch::Tensor& tensor, int destination, int tag = 0,
      const Call& call = {}) const;
  Work recv(
      const torch::Tensor& tensor, int source, int tag = 0,
      const Call& call = {}) const;
  /// Messages that follow each other, in order.
  Work send(
      const std::vector<torch::Tensor>& tensors, int destination, int tag = 0,
      const Call& call = {}) const;
  Work recv(
      const std::vector<torch::Tensor>& tensors, int source, int tag = 0,
      const Call& call = {}) const;
  /// Connects this rank with each of `peers`, which do the same. With NCCL a
  /// pair of ranks has a communicator of its own for send() and recv(), which
  /// its first message makes: that holds both hosts up until both are there.
  /// Pairs that connect in the order of their ranks cannot wait for each other
  /// in a ring. Elsewhere this has no effect.
  void connect_peers(const std::vector<int>& peers) const;
  /// Starts all messages at once: their order does not matter, and peers that
  /// each send before they receive do not deadlock. Both peers of a message
  /// send it in a batch, or neither does.
  Work batch_send_recv(
      const std::vector<PeerMessage>& messages, const Call& call = {}) const;

  /// Coalesced: one operation for a list of tensors of one dtype.
  Work all_reduce(
      const std::vector<torch::Tensor>& tensors, ReduceOp op = ReduceOp::sum,
      const Call& call = {}) const;
  Work all_gather(
      const std::vector<torch::Tensor>& outputs,
      const std::vector<torch::Tensor>& inputs, const Call& call = {}) const;
  Work reduce_scatter(
      const std::vector<torch::Tensor>& outputs,
      const std::vector<torch::Tensor>& inputs, ReduceOp op = ReduceOp::sum,
      const Call& call = {}) const;

  /// Returns when every rank of the group has called it.
  void barrier(const Call& call = {}) const;

  /// Why allocate_registered() gives no memory here; empty where it does. Every
  /// rank of the group calls this: where one rank has none, all get a reason.
  std::string why_not_registered() const;
  /// Memory [bytes] of uint8 that is registered with the communicator: a
  /// collective sends from it and receives into it without copies in between,
  /// on fewer multiprocessors. It comes from a pool of the communicator, which
  /// gives no memory back before the communicator ends.
  ///
  /// The call is local. NCCL notes the address (ncclCommRegister), and ranks
  /// exchange their notes in the first collective that uses it. So in each
  /// collective a tensor is registered on all ranks or on none: NCCL may hang
  /// where ranks differ. Ranks that allocate the same sizes in the same order
  /// get the same offsets, which NVLink SHARP needs; NCCL copies where they
  /// differ.
  ///
  /// Throws ConfigError where this rank has no such memory, and while a graph
  /// is captured: the memory would come from the graph's pool.
  ///
  /// Source: NCCL's User Guide, "User Buffer Registration".
  torch::Tensor allocate_registered(int64_t bytes) const;

  struct Impl;
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
