// One coroutine for all collectives: say what is called, meet, compare, and
// then take one of the three paths of communicator.h.
#include <algorithm>
#include <cstring>
#include <map>

#include "echelon/comm/shared_memory/communicator.h"
#include "echelon/comm/shared_memory/failure.h"

namespace echelon::local {
namespace {

// An asynchronous operation above this leaves its work to the progress thread,
// also when this rank comes last.
constexpr uint64_t kInlineBytes = 64 << 10;
// What one rank claims at a time in a direct all_reduce. The share of a rank
// that is late, or has no core, is done by the others.
constexpr uint64_t kChunkBytes = 256 << 10;

// Above it, every rank reading everything costs more than a second wait.
uint64_t payload_limit(int size) {
  return size == 2 ? 32 << 10
                   : std::min<uint64_t>(kPayloadBytes, (256 << 10) / size);
}

// Where rank r's slice of `count` elements begins; cache lines are not shared.
uint64_t slice(uint64_t count, int r, int size) {
  return r >= size ? count : count / size * r & ~uint64_t{63};
}

void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, bytes);
  }
}

// The part of `bytes` that step `step` of `stride` moves.
uint64_t part(uint64_t bytes, uint64_t stride, uint64_t step) {
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
  bool pause = false;

  bool reduces() const {
    return kind == Kind::all_reduce || kind == Kind::reduce;
  }
  uint64_t element() const { return size_of(shape.dtype); }
};

const char* Communicator::name_of(Kind kind) {
  static constexpr const char* names[] = {
      "barrier",    "all_reduce", "reduce", "all_gather", "reduce_scatter",
      "all_to_all", "broadcast",  "gather", "scatter"};
  return names[static_cast<int>(kind)];
}

OperationPtr Communicator::begin(Call call, Issue issue) {
  auto operation = std::make_shared<Operation>();
  operation->name = name_of(call.kind);
  operation->group = shared_from_this();
  operation->on_done = std::move(issue.on_done);
  call.pause = issue.async && call.shape.bytes() > kInlineBytes;
  // What peers need lies in the payload once it has begun. In all_to_all one of
  // them may have more.
  operation->lazy = fits_payload(call) && call.kind != Kind::all_to_all;
  {
    std::lock_guard lock(mutex_);
    operation->timeout = issue.timeout.count() > 0 ? issue.timeout : timeout_;
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
  call.data = static_cast<char*>(data);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::reduce(
    void* data, const Shape& shape, Reduction op, int root, Issue issue) {
  Call call{.kind = Kind::reduce, .shape = shape, .op = op, .root = root};
  call.data = static_cast<char*>(data);
  return begin(std::move(call), std::move(issue));
}

namespace {
template <class Pointer>
std::vector<Piece> pieces(const std::vector<Pointer>& data, uint64_t count) {
  std::vector<Piece> pieces;
  pieces.reserve(data.size());
  for (const auto pointer : data) {
    pieces.push_back({const_cast<char*>(pointer), count});
  }
  return pieces;
}
}  // namespace

OperationPtr Communicator::all_gather(
    const void* input, std::vector<char*> outputs, const Shape& shape,
    Issue issue) {
  Call call{.kind = Kind::all_gather, .shape = shape};
  call.data = static_cast<char*>(const_cast<void*>(input));
  call.outputs = pieces(outputs, shape.count);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::reduce_scatter(
    std::vector<const char*> inputs, void* output, const Shape& shape,
    Reduction op, Issue issue) {
  Call call{.kind = Kind::reduce_scatter, .shape = shape, .op = op};
  call.output = static_cast<char*>(output);
  call.inputs = pieces(inputs, shape.count);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::all_to_all(
    std::vector<Piece> inputs, std::vector<Piece> outputs, Dtype dtype,
    Issue issue) {
  uint64_t count = 0;
  for (const auto& piece : inputs) {
    count += piece.count;
  }
  Call call{.kind = Kind::all_to_all, .shape = Shape::flat(count, dtype)};
  call.inputs = std::move(inputs);
  call.outputs = std::move(outputs);
  return begin(std::move(call), std::move(issue));
}

OperationPtr
Communicator::broadcast(void* data, const Shape& shape, int root, Issue issue) {
  Call call{.kind = Kind::broadcast, .shape = shape, .root = root};
  call.data = static_cast<char*>(data);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::gather(
    const void* input, std::vector<char*> outputs, const Shape& shape, int root,
    Issue issue) {
  Call call{.kind = Kind::gather, .shape = shape, .root = root};
  call.data = static_cast<char*>(const_cast<void*>(input));
  call.outputs = pieces(outputs, shape.count);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::scatter(
    std::vector<const char*> inputs, void* output, const Shape& shape, int root,
    Issue issue) {
  Call call{.kind = Kind::scatter, .shape = shape, .root = root};
  call.output = static_cast<char*>(output);
  call.inputs = pieces(inputs, shape.count);
  return begin(std::move(call), std::move(issue));
}

OperationPtr Communicator::barrier(Issue issue) {
  return begin(Call{}, std::move(issue));
}

Task Communicator::run(Operation& operation, Call call) {
  const uint64_t s = operation.sequence;
  publish(s, call);
  co_await arrive(operation, call.pause);
  check(s);
  if (call.kind == Kind::barrier) {
    co_return;
  }
  if (everyone_in_payload(s)) {
    from_payload(s, call);
    co_return;
  }
  if (everyone_direct(s)) {
    const uint64_t bytes = call.shape.bytes();
    const uint64_t num_chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
    if (call.kind == Kind::all_reduce && num_chunks >= 2) {
      claim_chunks(s, call, num_chunks);
      co_await Until{Readiness::reaches(memory_.finished(s), num_chunks)};
      co_return;
    }
    {
      Touch touch(memory_.touching(rank_), *this);
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
  const uint64_t bytes = call.shape.bytes();
  const bool sends = call.root < 0 || call.kind == Kind::gather ||
                     call.kind == Kind::reduce || call.root == rank_;
  // Only the buffers that peers use must be in their reach.
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
    // Used again in two operations; everybody has left the last that used it.
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

std::string Communicator::describe(int r, uint64_t s) const {
  const auto& d = memory_.descriptor(r, s);
  const auto kind = static_cast<Kind>(d.operation);
  std::string text = name_of(kind);
  if (kind == Kind::barrier) {
    return text;
  }
  text += "(" + std::string(local::name_of(static_cast<Dtype>(d.dtype)));
  if (kind == Kind::all_to_all) {
    std::string expected;
    text += ", sends ";
    for (int j = 0; j < size_; ++j) {
      const Part& part = memory_.parts(r, s)[j];
      text += (j > 0 ? "," : "") + std::to_string(part.count);
      expected += (j > 0 ? "," : "") + std::to_string(part.expected);
    }
    return text + " receives " + expected + " elements)";
  }
  if (d.num_dims <= kMaxDims) {
    text += " [";
    for (int i = 0; i < d.num_dims; ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(d.shape[i]);
    }
    text += "]";
  } else {
    text += " of " + std::to_string(d.count) + " elements";
  }
  if (kind == Kind::all_reduce || kind == Kind::reduce ||
      kind == Kind::reduce_scatter) {
    text +=
        ", " + std::string(local::name_of(static_cast<Reduction>(d.reduction)));
  }
  if (d.root >= 0) {
    text += ", root " + std::to_string(d.root);
  }
  return text + ")";
}

// Every rank compares all of them, so every rank comes to the same verdict.
void Communicator::check(uint64_t s) const {
  const auto& first = memory_.descriptor(0, s);
  const bool all_to_all = first.operation == static_cast<int>(Kind::all_to_all);
  bool equal = true;
  for (int r = 1; r < size_ && equal; ++r) {
    const auto& other = memory_.descriptor(r, s);
    equal = other.operation == first.operation && other.dtype == first.dtype &&
            other.reduction == first.reduction && other.root == first.root &&
            (all_to_all ||
             (other.count == first.count && other.num_dims == first.num_dims &&
              (first.num_dims > kMaxDims ||
               std::equal(
                   first.shape, first.shape + first.num_dims, other.shape))));
  }
  for (int r = 0; r < size_ && equal && all_to_all; ++r) {
    for (int j = 0; j < size_ && equal; ++j) {
      equal = memory_.parts(r, s)[j].count == memory_.parts(j, s)[r].expected;
    }
  }
  if (equal) {
    return;
  }
  std::map<std::string, std::vector<int>> calls;
  for (int r = 0; r < size_; ++r) {
    calls[describe(r, s)].push_back(r);
  }
  std::string text = "[local] #" + std::to_string(s) + " of group " + name_ +
                     ": the ranks called different things:";
  std::vector<std::pair<std::vector<int>, std::string>> by_rank;
  for (const auto& [what, ranks] : calls) {
    by_rank.emplace_back(ranks, what);
  }
  std::sort(by_rank.begin(), by_rank.end());
  size_t largest = 0;
  for (const auto& [ranks, what] : by_rank) {
    text += (&ranks == &by_rank[0].first ? " rank " : "; rank ") + list(ranks) +
            " " + what;
    largest = std::max(largest, ranks.size());
  }
  std::vector<int> odd;
  for (const auto& [ranks, what] : by_rank) {
    if (ranks.size() < largest) {
      odd.insert(odd.end(), ranks.begin(), ranks.end());
    }
  }
  throw Mismatch(text, s, odd);
}

bool Communicator::everyone_in_payload(uint64_t s) const {
  for (int r = 0; r < size_; ++r) {
    if (!memory_.descriptor(r, s).in_payload) {
      return false;
    }
  }
  return true;
}

bool Communicator::everyone_direct(uint64_t s) const {
  for (int r = 0; r < size_; ++r) {
    if (!memory_.descriptor(r, s).direct) {
      return false;
    }
  }
  return true;
}

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
      void* out = scatters ? call.output : call.data;
      local::reduce(
          call.shape.dtype, call.op, size_, in.data(), 1, &out,
          call.shape.count);
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

// Elements [begin, end) of everybody's buffer, into everybody's (or root's).
void Communicator::reduce_slice(
    uint64_t s, const Call& call, uint64_t begin, uint64_t end) {
  std::vector<void*> all(size_);
  for (int j = 0; j < size_; ++j) {
    all[j] =
        address(j, memory_.descriptor(j, s).offset) + begin * call.element();
  }
  const bool to_one = call.kind == Kind::reduce;
  local::reduce(
      call.shape.dtype, call.op, size_, all.data(), to_one ? 1 : size_,
      to_one ? &all[call.root] : all.data(), end - begin);
}

void Communicator::claim_chunks(
    uint64_t s, const Call& call, uint64_t num_chunks) {
  const uint64_t per_chunk = kChunkBytes / call.element();
  for (;;) {
    Touch touch(memory_.touching(rank_), *this);
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
      void* out = call.output;
      local::reduce(
          call.shape.dtype, call.op, size_, in.data(), 1, &out,
          call.shape.count);
      return;
    }
    case Kind::all_gather:
    case Kind::gather:
    case Kind::all_to_all:
      // Not all from the same rank at once.
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

// Bytes that one step moves of each buffer.
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

void Communicator::stage_in(uint64_t step, const Call& call) {
  const uint64_t stride = this->stride(call);
  const uint64_t bytes = part(call.shape.bytes(), stride, step);
  const uint64_t at = step * stride;
  char* stage = memory_.stage(rank_, step);
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce: {
      // All but the slice that this rank will add up itself.
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
              part(piece.count * call.element(), stride, step));
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
      part(call.shape.bytes(), stride, step) / call.element();
  const uint64_t low = slice(count, rank_, size_);
  const uint64_t high = slice(count, rank_ + 1, size_);
  char* mine = call.data + step * stride;
  std::vector<const void*> in(size_);
  for (int j = 0; j < size_; ++j) {
    in[j] = (j == rank_ ? mine : memory_.stage(j, step)) + low * call.element();
  }
  void* out[] = {
      memory_.result(step) + low * call.element(), mine + low * call.element()};
  local::reduce(
      call.shape.dtype, call.op, size_, in.data(), 2, out, high - low);
}

void Communicator::stage_out(uint64_t step, const Call& call) {
  const uint64_t stride = this->stride(call);
  const uint64_t bytes = part(call.shape.bytes(), stride, step);
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
              part(call.outputs[j].count * call.element(), stride, step));
        }
      }
      return;
    case Kind::reduce_scatter: {
      std::vector<const void*> in(size_);
      for (int j = 0; j < size_; ++j) {
        in[j] = j == rank_ ? call.inputs[j].data + at
                           : memory_.stage(j, step) + rank_ * stride;
      }
      void* out = call.output + at;
      local::reduce(
          call.shape.dtype, call.op, size_, in.data(), 1, &out,
          bytes / call.element());
      return;
    }
    case Kind::barrier:
      return;
  }
}

}  // namespace echelon::local
