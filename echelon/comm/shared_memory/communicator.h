// The collectives of one group of ranks of this host, without LibTorch.
//
// The members' descriptors decide together how the bytes travel:
//   payload  small: each rank copies into its own slot; one wait; all read
//   direct   all ranks can address the others' memory: wait, reduce or copy in
//            place, wait
//   staged   otherwise: a pipeline through buffers that stay in the cache
// Every path adds in rank order, so the bits are the same on all ranks and
// paths.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/comm/shared_memory/attachment.h"
#include "echelon/comm/shared_memory/group_memory.h"
#include "echelon/comm/shared_memory/mailbox.h"
#include "echelon/comm/shared_memory/reduce.h"

namespace echelon::local {

/// The shape and dtype that the ranks of a collective compare.
struct Shape {
  int num_dims = 0;
  int64_t dims[kMaxDims] = {};
  uint64_t count = 0;  // elements
  Dtype dtype = Dtype::uint8;

  /// One dimension.
  static Shape flat(uint64_t count, Dtype dtype);
  uint64_t bytes() const { return count * size_of(dtype); }
};

/// A piece of one rank's memory; `count` elements.
struct Piece {
  char* data = nullptr;
  uint64_t count = 0;
};

/// How one call is made. The memory of the call must stay valid until the call
/// is done; `on_done` may own it.
struct Issue {
  bool async = true;
  std::function<void(Operation&)> on_done;
  /// Of a collective: the same on every rank. Ranks that differ in its last
  /// kMaxLabel - 1 bytes called different things.
  std::string label;
};

/// One rank's membership of a group. Every member makes the same collective
/// calls in the same order. Calls return at once, unless !issue.async.
class Communicator : public Supervisor,
                     public std::enable_shared_from_this<Communicator> {
 public:
  /// `ranks` are ranks of the host, by group rank. Every member calls, each
  /// rank in the same order; nobody waits.
  static std::shared_ptr<Communicator> create(
      std::shared_ptr<Host> host, const std::vector<int>& ranks,
      const std::string& name, std::chrono::milliseconds timeout);
  ~Communicator() override;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// data[shape] <- reduction, in place.
  OperationPtr
  all_reduce(void* data, const Shape& shape, Reduction op, Issue issue);
  /// Reduces for `root` alone, as all_reduce does; the other ranks' data is
  /// unspecified.
  OperationPtr
  reduce(void* data, const Shape& shape, Reduction op, int root, Issue issue);
  /// outputs[j][shape] <- rank j's input.
  OperationPtr all_gather(
      const void* input, std::vector<Piece> outputs, const Shape& shape,
      Issue issue);
  /// output[shape] <- reduction of every rank's inputs[rank()].
  OperationPtr reduce_scatter(
      std::vector<Piece> inputs, void* output, const Shape& shape, Reduction op,
      Issue issue);
  /// outputs[j] <- rank j's inputs[rank()].
  OperationPtr all_to_all(
      std::vector<Piece> inputs, std::vector<Piece> outputs, Dtype dtype,
      Issue issue);
  OperationPtr broadcast(void* data, const Shape& shape, int root, Issue issue);
  /// outputs (by rank; empty but on root) <- inputs.
  OperationPtr gather(
      const void* input, std::vector<Piece> outputs, const Shape& shape,
      int root, Issue issue);
  /// output <- root's inputs[rank()] (empty but on root).
  OperationPtr scatter(
      std::vector<Piece> inputs, void* output, const Shape& shape, int root,
      Issue issue);
  OperationPtr barrier(Issue issue);

  /// Messages between two ranks match by tag; messages of one tag stay in
  /// order. A receive of another tag sets messages aside in local memory. A
  /// sender can send up to 1 MiB (4 pieces of at most 256 KiB) before the
  /// receiver comes.
  OperationPtr send(
      const void* data, const Shape& shape, int destination, int tag,
      Issue issue);
  OperationPtr
  receive(void* data, const Shape& shape, int source, int tag, Issue issue);

  // Supervisor
  bool failed() const override {
    return memory_.verdict().passed() ||
           attachment_->segment().verdict().passed();
  }
  std::exception_ptr failure(const Operation& operation) override;
  std::exception_ptr peer_left(const Operation& operation) override;
  std::exception_ptr expire(const Operation& operation) override;
  void quiesce() override;

 private:
  enum class Kind : uint8_t {
    barrier,
    all_reduce,
    reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    broadcast,
    gather,
    scatter
  };
  struct Call;  // a collective's parameters

  Communicator(
      std::shared_ptr<Host> host, std::vector<int> ranks, std::string name,
      std::chrono::milliseconds timeout);
  static const char* name_of(Kind kind);

  OperationPtr begin(Call call, Issue issue);
  Task run(Operation& operation, Call call);
  void publish(uint64_t s, const Call& call);
  bool fits_payload(const Call& call) const;
  bool fill_payload(uint64_t s, const Call& call);
  void check(uint64_t s) const;
  std::string describe(int r, uint64_t s) const;
  bool everyone(uint64_t s, uint8_t Descriptor::*flag) const;

  // The rest of a collective, once everybody has arrived in it.
  void from_payload(uint64_t s, const Call& call);
  void in_place(uint64_t s, const Call& call);
  void reduce_slice(uint64_t s, const Call& call, uint64_t begin, uint64_t end);
  void claim_chunks(uint64_t s, const Call& call, uint64_t num_chunks);
  uint64_t stride(const Call& call) const;
  uint64_t num_steps(uint64_t s, const Call& call) const;
  void stage_in(uint64_t step, const Call& call);
  void stage_middle(uint64_t step, const Call& call);
  void stage_out(uint64_t step, const Call& call);

  Until arrive(Operation& operation, bool pause = false);
  void ring_others();
  char* address(int r, uint64_t offset) const {
    return attachment_->address(ranks_[r], offset);
  }

  OperationPtr new_operation(const char* name, Issue& issue, int peer = -1);
  Task run_send(const char* data, Shape shape, int to, int tag);
  Task run_receive(Operation& operation, std::shared_ptr<Receive> receive);

  std::string title(const Operation& operation) const;
  std::vector<int> absent(const Operation& operation) const;
  std::string list(const std::vector<int>& group_ranks) const;

  std::shared_ptr<Host> host_;
  Attachment* attachment_;
  std::vector<int> ranks_;
  std::string name_;
  int rank_;
  int size_;
  GroupSlot slot_;
  GroupMemory memory_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // order of issue
  uint64_t sequence_ = 0;
  std::shared_ptr<Lane> lane_;
  std::vector<std::shared_ptr<Lane>> send_lanes_;
  std::vector<uint64_t> sent_;    // messages, by destination
  std::vector<uint64_t> pieces_;  // fragments, by destination
  uint64_t received_ = 0;         // receives
  std::unique_ptr<Mailbox> mailbox_;
};

}  // namespace echelon::local
