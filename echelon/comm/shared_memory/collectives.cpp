// One coroutine runs all collectives. A rank publishes its descriptor, waits
// for the others, and compares the calls; then all take the same one of the
// three paths of communicator.h.
#include <algorithm>
#include <cstring>
#include <ranges>

#include "echelon/comm/shared_memory/communicator.h"

namespace echelon::local {
namespace {

// An asynchronous operation of more bytes leaves its work to the progress
// thread, even when this rank comes last.
constexpr uint64_t kInlineBytes = 64 << 10;
// A rank claims this much at a time in a direct all_reduce: the others do the
// share of a rank that is late or has no core.
constexpr uint64_t kChunkBytes = 256 << 10;

// In larger payloads, every rank reading everything costs more than a second
// wait.
uint64_t payload_limit(int size) {
  return size == 2 ? 32 << 10
                   : std::min<uint64_t>(kPayloadBytes, (256 << 10) / size);
}

// The first element of rank r's slice; slices share no cache line.
uint64_t slice(uint64_t count, int r, int size) {
  return r >= size ? count : count / size * r & ~uint64_t{63};
}

void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, bytes);
  }
}

char* bytes_at(const void* data) {
  return static_cast<char*>(const_cast<void*>(data));
}

// The bytes that step `step` moves of a buffer of `bytes`.
uint64_t step_bytes(uint64_t bytes, uint64_t stride, uint64_t step) {
  return bytes > step * stride ? std::min(stride, bytes - step * stride) : 0;
}

}  // namespace

struct Communicator::Call {
  Kind kind = Kind::barrier;
  Shape shape;
  Reduction op = Reduction::sum;
  int root = -1;
  char* data = nullptr;  // in place, or the input
  char* output = nullptr;
  std::vector<Piece> inputs{};   // by rank
  std::vector<Piece> outputs{};  // by rank
  std::string label{};
  bool pause = false;

  bool reduces() const {
    return kind == Kind::all_reduce || kind == Kind::reduce;
  }
  uint64_t element() const { return size_of(shape.dtype); }
  // Each of outs[count] <- the reduction of `in`.
  void reduce(
      const std::vector<const void*>& in, const std::vector<void*>& outs,
      uint64_t count) const {
    local::reduce(
        shape.dtype, op,
        {static_cast<int>(in.size()), in.data(), static_cast<int>(outs.size()),
         outs.data(), count});
  }
};

const char* Communicator::name_of(Kind kind) {
  static constexpr const char* names[] = {
      "barrier",    "all_reduce", "reduce", "all_gather", "reduce_scatter",
      "all_to_all", "broadcast",  "gather", "scatter"};
  return names[static_cast<int>(kind)];
}

OperationPtr Communicator::begin(Call call, Issue issue) {
  auto operation = new_operation(name_of(call.kind), issue);
  call.pause = issue.async && call.shape.bytes() > kInlineBytes;
  call.label = std::move(issue.label);
  {
    std::lock_guard lock(mutex_);
    operation->sequence = sequence_++;
    operation->task = run(*operation, std::move(call));
    attachment_->engine().enqueue(lane_, operation);
  }
  attachment_->engine().begin(operation, issue.async);
  return operation;
}

OperationPtr Communicator::all_reduce(
    void* data, const Shape& shape, Reduction op, Issue issue) {
  Call call{.kind = Kind::all_reduce, .shape = shape, .op = op};
  call.data = bytes_at(data);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::reduce(
    void* data, const Shape& shape, Reduction op, int root, Issue issue) {
  Call call{.kind = Kind::reduce, .shape = shape, .op = op, .root = root};
  call.data = bytes_at(data);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::all_gather(
    const void* input, std::vector<Piece> outputs, const Shape& shape,
    Issue issue) {
  Call call{.kind = Kind::all_gather, .shape = shape};
  call.data = bytes_at(input);
  call.outputs = std::move(outputs);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::reduce_scatter(
    std::vector<Piece> inputs, void* output, const Shape& shape, Reduction op,
    Issue issue) {
  Call call{.kind = Kind::reduce_scatter, .shape = shape, .op = op};
  call.output = bytes_at(output);
  call.inputs = std::move(inputs);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::all_to_all(
    std::vector<Piece> inputs, std::vector<Piece> outputs, Dtype dtype,
    Issue issue) {
  uint64_t count = 0;
  for (const auto& piece : inputs) count += piece.count;
  Call call{.kind = Kind::all_to_all, .shape = Shape::flat(count, dtype)};
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  return begin(std::move(call), std::move(issue));
}

OperationPtr
Communicator::broadcast(void* data, const Shape& shape, int root, Issue issue) {
  Call call{.kind = Kind::broadcast, .shape = shape, .root = root};
  call.data = bytes_at(data);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::gather(
    const void* input, std::vector<Piece> outputs, const Shape& shape, int root,
    Issue issue) {
  Call call{.kind = Kind::gather, .shape = shape, .root = root};
  call.data = bytes_at(input);
  call.outputs = std::move(outputs);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::scatter(
    std::vector<Piece> inputs, void* output, const Shape& shape, int root,
    Issue issue) {
  Call call{.kind = Kind::scatter, .shape = shape, .root = root};
  call.output = bytes_at(output);
  call.inputs = std::move(inputs);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::barrier(Issue issue) {
  return begin(Call{}, std::move(issue));
}

// All ranks take the same branch, since each sees the same descriptors. A path
// ends with an arrival only where a peer could still use this rank's memory.
Task Communicator::run(Operation& operation, Call call) {
  const uint64_t s = operation.sequence;
  publish(s, call);
  co_await arrive(operation, call.pause);
  check(s);
  if (call.kind == Kind::barrier) {
    co_return;
  }
  if (everyone(s, &Descriptor::in_payload)) {
    from_payload(s, call);
    co_return;
  }
  if (everyone(s, &Descriptor::direct)) {
    const uint64_t bytes = call.shape.bytes();
    const uint64_t num_chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
    if (call.kind == Kind::all_reduce && num_chunks >= 2) {
      claim_chunks(s, call, num_chunks);
      co_await Until{Readiness::reaches(memory_.finished(s), num_chunks)};
      co_return;
    }
    {
      PeerAccess access(memory_.accesses(rank_), *this);
      in_place(s, call);
    }
    co_await arrive(operation);
    co_return;
  }
  // Each step fills one pair of buffers while the one before is emptied.
  const uint64_t num = num_steps(s, call);
  const uint64_t depth = call.reduces() ? 2 : 1;
  for (uint64_t step = 0; step < num + depth; ++step) {
    if (step < num) {
      stage_in(step, call);
    }
    if (call.reduces() && step >= 1 && step - 1 < num) {
      stage_middle(step - 1, call);
    }
    if (step >= depth) {
      stage_out(step - depth, call);
    }
    if (step + 1 < num + depth) {
      co_await arrive(operation);
    }
  }
}

void Communicator::publish(uint64_t s, const Call& call) {
  auto& mine = memory_.descriptor(rank_, s);
  mine.count = call.shape.count;
  mine.num_dims = static_cast<uint8_t>(call.shape.num_dims);
  std::copy_n(call.shape.dims, kMaxDims, mine.shape);
  mine.operation = static_cast<uint8_t>(call.kind);
  mine.dtype = static_cast<uint8_t>(call.shape.dtype);
  mine.reduction = static_cast<uint8_t>(call.op);
  mine.root = call.root;
  const size_t kept = std::min(call.label.size(), kMaxLabel - 1);
  std::memset(mine.label, 0, kMaxLabel);
  call.label.copy(mine.label, kept, call.label.size() - kept);
  const uint64_t bytes = call.shape.bytes();
  const bool sends = call.root < 0 || call.kind == Kind::gather ||
                     call.kind == Kind::reduce || call.root == rank_;
  // Only the buffers that peers access must be addressable by them.
  bool direct = true;
  if (call.data != nullptr && sends) {
    direct = attachment_->locate(call.data, bytes, mine.offset);
  }
  Part* parts = memory_.parts(rank_, s);
  for (int j = 0; j < static_cast<int>(call.inputs.size()); ++j) {
    const auto& piece = call.inputs[j];
    direct &= attachment_->locate(
        piece.data, piece.count * call.element(), parts[j].offset);
    parts[j].count = piece.count;
    parts[j].expected =
        call.kind == Kind::all_to_all ? call.outputs[j].count : 0;
  }
  mine.direct = direct;
  mine.in_payload = fill_payload(s, call);
  if (rank_ == 0) {
    // The slot of s + 2: everybody has left the operation that used it last.
    memory_.claims(s + 2).store(0, std::memory_order_relaxed);
    memory_.finished(s + 2).store(0, std::memory_order_relaxed);
  }
  mine.stamp.store(s + 1, std::memory_order_release);
}

// True when this rank's bytes are small enough to go through its payload slot.
bool Communicator::fits_payload(const Call& call) const {
  const uint64_t bytes = call.shape.bytes();
  switch (call.kind) {
    case Kind::barrier:
      return true;
    case Kind::all_reduce:
    case Kind::reduce:
      return bytes <= payload_limit(size_);
    case Kind::reduce_scatter:
    case Kind::scatter:
      return bytes * size_ <= kPayloadBytes;
    default:
      return bytes <= kPayloadBytes;
  }
}

bool Communicator::fill_payload(uint64_t s, const Call& call) {
  if (!fits_payload(call)) {
    return false;
  }
  char* slot = memory_.payload(rank_, s);
  switch (call.kind) {
    case Kind::barrier:
      break;
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::all_gather:
    case Kind::gather:
    case Kind::broadcast:
      if (call.kind != Kind::broadcast || rank_ == call.root) {
        copy(slot, call.data, call.shape.bytes());
      }
      break;
    case Kind::reduce_scatter:
    case Kind::scatter:
    case Kind::all_to_all:
      for (const auto& piece : call.inputs) {
        copy(slot, piece.data, piece.count * call.element());
        slot += piece.count * call.element();
      }
  }
  return true;
}

bool Communicator::everyone(uint64_t s, uint8_t Descriptor::*flag) const {
  const auto ranks = std::views::iota(0, size_);
  return std::ranges::all_of(
      ranks, [&](int r) { return memory_.descriptor(r, s).*flag != 0; });
}

// Reads the results from the payload slots of all ranks.
void Communicator::from_payload(uint64_t s, const Call& call) {
  const uint64_t bytes = call.shape.bytes();
  const bool is_root = rank_ == call.root;
  std::vector<const void*> in(size_);
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
    case Kind::reduce_scatter: {
      if (call.kind == Kind::reduce && !is_root) {
        return;
      }
      const bool scatters = call.kind == Kind::reduce_scatter;
      for (int j = 0; j < size_; ++j) {
        in[j] = memory_.payload(j, s) + (scatters ? rank_ * bytes : 0);
      }
      call.reduce(in, {scatters ? call.output : call.data}, call.shape.count);
      return;
    }
    case Kind::all_gather:
    case Kind::gather:
      for (size_t j = 0; j < call.outputs.size(); ++j) {
        copy(call.outputs[j].data, memory_.payload(j, s), bytes);
      }
      return;
    case Kind::all_to_all:
      for (int j = 0; j < size_; ++j) {
        uint64_t before = 0;
        for (int k = 0; k < rank_; ++k) {
          before += memory_.parts(j, s)[k].count;
        }
        copy(
            call.outputs[j].data,
            memory_.payload(j, s) + before * call.element(),
            call.outputs[j].count * call.element());
      }
      return;
    case Kind::broadcast:
      if (!is_root) {
        copy(call.data, memory_.payload(call.root, s), bytes);
      }
      return;
    case Kind::scatter:
      copy(call.output, memory_.payload(call.root, s) + rank_ * bytes, bytes);
      return;
    case Kind::barrier:
      return;
  }
}

// Reduces elements [begin, end) of all ranks' buffers into all of them, or into
// the root's.
void Communicator::reduce_slice(
    uint64_t s, const Call& call, uint64_t begin, uint64_t end) {
  std::vector<void*> all(size_);
  for (int j = 0; j < size_; ++j) {
    all[j] =
        address(j, memory_.descriptor(j, s).offset) + begin * call.element();
  }
  const std::vector<const void*> in(all.begin(), all.end());
  if (call.kind == Kind::reduce) all = {all[call.root]};
  call.reduce(in, all, end - begin);
}

void Communicator::claim_chunks(
    uint64_t s, const Call& call, uint64_t num_chunks) {
  const uint64_t per_chunk = kChunkBytes / call.element();
  for (;;) {
    PeerAccess access(memory_.accesses(rank_), *this);
    const uint64_t k = memory_.claims(s).fetch_add(1);
    if (k >= num_chunks) {
      return;
    }
    reduce_slice(
        s, call, k * per_chunk,
        std::min(call.shape.count, (k + 1) * per_chunk));
    if (memory_.finished(s).fetch_add(1) + 1 == num_chunks) {
      ring_others();
    }
  }
}

// Writes this rank's results from its peers' buffers; all_reduce and reduce
// also write one slice of theirs.
void Communicator::in_place(uint64_t s, const Call& call) {
  const uint64_t bytes = call.shape.bytes();
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      reduce_slice(
          s, call, slice(call.shape.count, rank_, size_),
          slice(call.shape.count, rank_ + 1, size_));
      return;
    case Kind::reduce_scatter: {
      std::vector<const void*> in(size_);
      for (int j = 0; j < size_; ++j) {
        in[j] = address(j, memory_.parts(j, s)[rank_].offset);
      }
      call.reduce(in, {call.output}, call.shape.count);
      return;
    }
    case Kind::all_gather:
    case Kind::gather:
    case Kind::all_to_all:
      // Each rank starts with itself, so that not all read from one rank.
      for (size_t i = 0; i < call.outputs.size(); ++i) {
        const int j = static_cast<int>((rank_ + i) % size_);
        const uint64_t offset = call.kind == Kind::all_to_all
                                    ? memory_.parts(j, s)[rank_].offset
                                    : memory_.descriptor(j, s).offset;
        copy(
            call.outputs[j].data, address(j, offset),
            call.outputs[j].count * call.element());
      }
      return;
    case Kind::broadcast:
      if (rank_ != call.root) {
        copy(
            call.data,
            address(call.root, memory_.descriptor(call.root, s).offset), bytes);
      }
      return;
    case Kind::scatter:
      copy(
          call.output,
          address(call.root, memory_.parts(call.root, s)[rank_].offset), bytes);
      return;
    case Kind::barrier:
      return;
  }
}

// The bytes that one step moves of each buffer.
uint64_t Communicator::stride(const Call& call) const {
  switch (call.kind) {
    case Kind::reduce_scatter:
    case Kind::scatter:
    case Kind::all_to_all:
      return memory_.stage_bytes() / size_ & ~uint64_t{63};
    default:
      return memory_.stage_bytes();
  }
}

uint64_t Communicator::num_steps(uint64_t s, const Call& call) const {
  uint64_t bytes = call.shape.bytes();
  if (call.kind == Kind::all_to_all) {
    bytes = 0;
    for (int r = 0; r < size_; ++r) {
      for (int j = 0; j < size_; ++j) {
        bytes = std::max(bytes, memory_.parts(r, s)[j].count * call.element());
      }
    }
  }
  return (bytes + stride(call) - 1) / stride(call);
}

// Copies this rank's part of a step into its stage, for the peers to read.
void Communicator::stage_in(uint64_t step, const Call& call) {
  const uint64_t stride = this->stride(call);
  const uint64_t bytes = step_bytes(call.shape.bytes(), stride, step);
  const uint64_t at = step * stride;
  char* stage = memory_.stage(rank_, step);
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      // The range is all but the slice that this rank reduces itself.
      const uint64_t count = bytes / call.element();
      const uint64_t low = slice(count, rank_, size_) * call.element();
      const uint64_t high = slice(count, rank_ + 1, size_) * call.element();
      copy(stage, call.data + at, low);
      copy(stage + high, call.data + at + high, bytes - high);
      return;
    }
    case Kind::all_gather:
    case Kind::gather:
      if (step == 0 && !call.outputs.empty()) {
        copy(call.outputs[rank_].data, call.data, call.shape.bytes());
      }
      copy(stage, call.data + at, bytes);
      return;
    case Kind::broadcast:
      if (rank_ == call.root) {
        copy(stage, call.data + at, bytes);
      }
      return;
    case Kind::reduce_scatter:
    case Kind::scatter:
    case Kind::all_to_all:
      for (int j = 0; j < static_cast<int>(call.inputs.size()); ++j) {
        const auto& piece = call.inputs[j];
        if (j != rank_) {
          copy(
              stage + j * stride, piece.data + at,
              step_bytes(piece.count * call.element(), stride, step));
        } else if (step == 0 && call.kind == Kind::all_to_all) {
          copy(call.outputs[j].data, piece.data, piece.count * call.element());
        } else if (step == 0 && call.kind == Kind::scatter) {
          copy(call.output, piece.data, call.shape.bytes());
        }
      }
      return;
    case Kind::barrier:
      return;
  }
}

void Communicator::stage_middle(uint64_t step, const Call& call) {
  const uint64_t stride = this->stride(call);
  const uint64_t count =
      step_bytes(call.shape.bytes(), stride, step) / call.element();
  const uint64_t low = slice(count, rank_, size_);
  const uint64_t high = slice(count, rank_ + 1, size_);
  char* mine = call.data + step * stride;
  std::vector<const void*> in(size_);
  for (int j = 0; j < size_; ++j) {
    in[j] = (j == rank_ ? mine : memory_.stage(j, step)) + low * call.element();
  }
  call.reduce(
      in,
      {memory_.result(step) + low * call.element(),
       mine + low * call.element()},
      high - low);
}

// Copies the results of a step from the stages to this rank's buffers.
void Communicator::stage_out(uint64_t step, const Call& call) {
  const uint64_t stride = this->stride(call);
  const uint64_t bytes = step_bytes(call.shape.bytes(), stride, step);
  const uint64_t at = step * stride;
  const bool is_root = rank_ == call.root;
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      if (call.kind == Kind::reduce && !is_root) {
        return;
      }
      const uint64_t count = bytes / call.element();
      const uint64_t low = slice(count, rank_, size_) * call.element();
      const uint64_t high = slice(count, rank_ + 1, size_) * call.element();
      const char* result = memory_.result(step);
      copy(call.data + at, result, low);
      copy(call.data + at + high, result + high, bytes - high);
      return;
    }
    case Kind::all_gather:
    case Kind::gather:
      for (int j = 0; j < static_cast<int>(call.outputs.size()); ++j) {
        if (j != rank_) {
          copy(call.outputs[j].data + at, memory_.stage(j, step), bytes);
        }
      }
      return;
    case Kind::broadcast:
      if (!is_root) {
        copy(call.data + at, memory_.stage(call.root, step), bytes);
      }
      return;
    case Kind::scatter:
      if (!is_root) {
        copy(
            call.output + at, memory_.stage(call.root, step) + rank_ * stride,
            bytes);
      }
      return;
    case Kind::all_to_all:
      for (int j = 0; j < size_; ++j) {
        if (j != rank_) {
          copy(
              call.outputs[j].data + at,
              memory_.stage(j, step) + rank_ * stride,
              step_bytes(call.outputs[j].count * call.element(), stride, step));
        }
      }
      return;
    case Kind::reduce_scatter: {
      std::vector<const void*> in(size_);
      for (int j = 0; j < size_; ++j) {
        in[j] = j == rank_ ? call.inputs[j].data + at
                           : memory_.stage(j, step) + rank_ * stride;
      }
      call.reduce(in, {call.output + at}, bytes / call.element());
      return;
    }
    case Kind::barrier:
      return;
  }
}

}  // namespace echelon::local
