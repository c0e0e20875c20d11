// What is common to the operations of a group: arriving, comparing the calls,
// explaining failures; and the messages between two ranks. The collectives
// themselves are in collectives.cpp.
//
// Arriving: all members share one counter of arrivals, and phase p is complete
// when it reaches p times the size. So one atomic addition arrives, and a wait
// looks at one word. Each rank also counts its own arrivals, which tells who is
// missing.
//
// Messages: a channel of kFragments fragments lies between each pair of ranks
// in each direction. The sender alone writes `head`, the receiver alone writes
// `tail`, and fragment k uses slot k % kFragments, so the sender waits until k
// - kFragments + 1 fragments are taken. A large message whose memory the
// receiver can address is one fragment with its offset; the sender then waits
// until it is taken, since its memory is read in place.
//
// Failing: the first verdict counts, and every operation then ends with an
// error made from it. It ends only after quiesce(), because a peer may still be
// reading its memory.
#include "echelon/comm/shared_memory/communicator.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {

template <class Error>
std::exception_ptr make(
    const std::string& text, const Operation& operation,
    const std::vector<int>& missing) {
  return std::make_exception_ptr(Error(text, operation.sequence, missing));
}

}  // namespace

Shape Shape::flat(uint64_t count, Dtype dtype) {
  Shape shape;
  shape.num_dims = 1;
  shape.dims[0] = static_cast<int64_t>(count);
  shape.count = count;
  shape.dtype = dtype;
  return shape;
}

std::shared_ptr<Communicator> Communicator::create(
    std::shared_ptr<Host> host, const std::vector<int>& ranks,
    const std::string& name, std::chrono::milliseconds timeout) {
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct =
      std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  if (ranks.empty() || !distinct || sorted.front() < 0 ||
      sorted.back() >= host->size() ||
      std::count(ranks.begin(), ranks.end(), host->rank()) != 1) {
    std::string text;
    for (const int r : ranks) {
      text += " " + std::to_string(r);
    }
    throw ConfigError(format(
        "[local] group {} of ranks{} on rank {} of {}: they must be distinct, "
        "below {}, and include the caller",
        name, text, host->rank(), host->size(), host->size()));
  }
  return std::shared_ptr<Communicator>(
      new Communicator(std::move(host), ranks, name, timeout));
}

Communicator::Communicator(
    std::shared_ptr<Host> host, std::vector<int> ranks, std::string name,
    std::chrono::milliseconds timeout)
    : host_(std::move(host)),
      attachment_(static_cast<Attachment*>(host_.get())),
      ranks_(std::move(ranks)),
      name_(std::move(name)),
      rank_(static_cast<int>(
          std::find(ranks_.begin(), ranks_.end(), attachment_->rank()) -
          ranks_.begin())),
      size_(static_cast<int>(ranks_.size())),
      memory_(size_),
      timeout_(timeout),
      lane_(std::make_shared<Lane>()),
      send_lanes_(size_),
      sent_(size_),
      pieces_(size_) {
  std::string key = format("{}|{}|", name_, join(ranks_, ","));
  key += std::to_string(attachment_->next_group(key));
  auto& segment = attachment_->segment();
  slot_ = segment.join_group(key, size_, memory_.bytes());
  memory_.bind(segment.at(slot_.offset));
  for (auto& lane : send_lanes_) lane = std::make_shared<Lane>();
  mailbox_ = std::make_unique<Mailbox>(Mailbox::Wire{
      memory_, segment, *this, rank_, size_,
      [this](int from, uint64_t offset) { return address(from, offset); },
      [this](int r) { attachment_->engine().ring(ranks_[r]); }});
}

Communicator::~Communicator() {
  auto& segment = attachment_->segment();
  try {
    segment.leave_group(slot_, [&] {
      for (int from = 0; from < size_; ++from) {
        for (int to = 0; to < size_; ++to) {
          if (const uint64_t data = memory_.channel(from, to).data) {
            segment.release(data, kFragments * kFragmentBytes);
          }
        }
      }
    });
  } catch (const CommError&) {
    // The job on this host has failed: its memory goes with it.
  }
}

void Communicator::ring_others() {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) {
      attachment_->engine().ring(ranks_[r]);
    }
  }
}

// The arrival that completes a phase wakes the others.
Until Communicator::arrive(Operation& operation, bool pause) {
  auto& progress = memory_.progress(rank_);
  const uint64_t phase = progress.load(std::memory_order_relaxed) + 1;
  progress.store(phase, std::memory_order_relaxed);
  operation.phase = phase;
  auto& arrivals = memory_.arrivals();
  if (arrivals.fetch_add(1, std::memory_order_seq_cst) + 1 == phase * size_) {
    ring_others();
  }
  return {Readiness::reaches(arrivals, phase * size_), pause};
}

// Peers that see the verdict start no access; this waits for those that have
// one. A dead or stopped peer never ends its access, so there is a limit.
void Communicator::quiesce() {
  const auto begin = Operation::Clock::now();
  for (int r = 0; r < size_; ++r) {
    const auto& left = attachment_->segment().rank(ranks_[r]).left;
    while (r != rank_ && memory_.accesses(r).load() != 0 && left.load() == 0 &&
           Operation::Clock::now() - begin < std::chrono::seconds(1)) {
      sched_yield();
    }
  }
}

std::string Communicator::list(const std::vector<int>& group_ranks) const {
  return join(group_ranks, ", ", [&](int r) {
    return ranks_[r] == r ? std::to_string(r)
                          : format("{} (rank {} of the host)", r, ranks_[r]);
  });
}

std::string Communicator::title(const Operation& operation) const {
  const std::string peer =
      operation.peer < 0
          ? ""
          : format(
                " {} rank {}", operation.outgoing ? "to" : "from",
                operation.peer);
  return format(
      "[local] {} #{}{} of group {}", operation.name, operation.sequence, peer,
      name_);
}

std::vector<int> Communicator::absent(const Operation& operation) const {
  if (operation.peer >= 0) {
    return {operation.peer};
  }
  std::vector<int> absent;
  for (int r = 0; r < size_; ++r) {
    if (memory_.progress(r).load() < operation.phase) {
      absent.push_back(r);
    }
  }
  for (int r = 0; absent.empty() && r < size_; ++r) {
    if (r != rank_ && memory_.accesses(r).load() != 0) {
      absent = {r};  // stopped in the middle of its work
    }
  }
  return absent;
}

std::exception_ptr Communicator::failure(const Operation& operation) {
  Verdict::Kind kind;
  uint64_t sequence = 0;
  std::vector<int> missing;
  std::string why;
  auto& host_verdict = attachment_->segment().verdict();
  if (host_verdict.passed()) {
    std::vector<int> host_ranks;
    host_verdict.read(kind, sequence, host_ranks, why);
    for (int r = 0; r < size_; ++r) {
      if (std::count(host_ranks.begin(), host_ranks.end(), ranks_[r]) > 0) {
        missing.push_back(r);
      }
    }
  } else {
    memory_.verdict().read(kind, sequence, missing, why);
  }
  const std::string text = title(operation) + ": " + why;
  switch (kind) {
    case Verdict::Kind::lost:
      return make<PeerLost>(text, operation, missing);
    case Verdict::Kind::timeout:
      return make<Timeout>(text, operation, missing);
    default:
      return make<Aborted>(text, operation, missing);
  }
}

// A rank leaves when its own operations are done. So a collective that still
// waits after a member has left was never joined by it.
std::exception_ptr Communicator::peer_left(const Operation& operation) {
  std::vector<int> left;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || (operation.peer >= 0 && r != operation.peer)) {
      continue;
    }
    // A rank that was lost (2) has a verdict of its own, which comes at once.
    if (attachment_->segment().rank(ranks_[r]).left.load() == 1) {
      left.push_back(r);
    }
  }
  if (left.empty()) {
    return nullptr;
  }
  return make<PeerLost>(
      title(operation) + ": rank " + list(left) + " has left the job",
      operation, left);
}

std::exception_ptr Communicator::expire(const Operation& operation) {
  const auto missing = absent(operation);
  std::string why = format(
      "timed out after {:.1f} s on rank {}", operation.timeout.count() / 1000.0,
      rank_);
  if (operation.peer >= 0) {
    why += format(
        ": rank {} {}", operation.peer,
        operation.outgoing ? "took no message" : "sent no such message");
  } else {
    std::vector<int> arrived;
    for (int r = 0; r < size_; ++r) {
      if (std::count(missing.begin(), missing.end(), r) == 0) {
        arrived.push_back(r);
      }
    }
    why += format(
        "; not arrived: rank {}; arrived: rank {}", list(missing),
        list(arrived));
  }
  memory_.verdict().pass(
      Verdict::Kind::timeout, operation.sequence, missing,
      format("{} #{} {}", operation.name, operation.sequence, why));
  ring_others();
  attachment_->engine().ring_self();
  return make<Timeout>(title(operation) + " " + why, operation, missing);
}

std::string Communicator::describe(int r, uint64_t s) const {
  const auto& d = memory_.descriptor(r, s);
  const auto kind = static_cast<Kind>(d.operation);
  std::string text = name_of(kind);
  if (d.label[0] != '\0') {
    text += format(" \"{}\"", std::string(d.label));
  }
  if (kind == Kind::barrier) {
    return text;
  }
  text += format("({}", local::name_of(static_cast<Dtype>(d.dtype)));
  if (kind == Kind::all_to_all) {
    const std::span parts(memory_.parts(r, s), size_);
    return format(
        "{}, sends {} receives {} elements)", text,
        join(parts, ",", &Part::count), join(parts, ",", &Part::expected));
  }
  if (d.num_dims <= kMaxDims) {
    text += format(" [{}]", join(std::span(d.shape, d.num_dims), ", "));
  } else {
    text += format(" of {} elements", d.count);
  }
  if (kind == Kind::all_reduce || kind == Kind::reduce ||
      kind == Kind::reduce_scatter) {
    text += format(", {}", local::name_of(static_cast<Reduction>(d.reduction)));
  }
  if (d.root >= 0) {
    text += format(", root {}", d.root);
  }
  return text + ")";
}

// Every rank compares all descriptors, so all ranks come to the same verdict.
void Communicator::check(uint64_t s) const {
  const auto& first = memory_.descriptor(0, s);
  const bool all_to_all = first.operation == static_cast<int>(Kind::all_to_all);
  bool equal = true;
  for (int r = 1; r < size_ && equal; ++r) {
    const auto& other = memory_.descriptor(r, s);
    equal = other.operation == first.operation && other.dtype == first.dtype &&
            other.reduction == first.reduction && other.root == first.root &&
            std::memcmp(other.label, first.label, kMaxLabel) == 0 &&
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
  std::vector<std::pair<std::vector<int>, std::string>> by_rank;
  for (const auto& [what, ranks] : calls) {
    by_rank.emplace_back(ranks, what);
  }
  std::sort(by_rank.begin(), by_rank.end());
  const std::string text = join(by_rank, "; ", [&](const auto& call) {
    return format("rank {} {}", list(call.first), call.second);
  });
  size_t largest = 0;
  for (const auto& [ranks, what] : by_rank) {
    largest = std::max(largest, ranks.size());
  }
  std::vector<int> odd;
  for (const auto& [ranks, what] : by_rank) {
    if (ranks.size() < largest) {
      odd.insert(odd.end(), ranks.begin(), ranks.end());
    }
  }
  throw Mismatch(
      format(
          "[local] #{} of group {}: the ranks called different things: {}", s,
          name_, text),
      s, odd);
}

OperationPtr
Communicator::new_operation(const char* name, Issue& issue, int peer) {
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->peer = peer;
  operation->timeout = timeout_;
  operation->group = shared_from_this();
  operation->on_done = std::move(issue.on_done);
  return operation;
}

OperationPtr Communicator::send(
    const void* data, const Shape& shape, int destination, int tag,
    Issue issue) {
  auto operation = new_operation("send", issue, destination);
  operation->outgoing = true;
  {
    std::lock_guard lock(mutex_);
    operation->sequence = sent_[destination]++;
    operation->task =
        run_send(static_cast<const char*>(data), shape, destination, tag);
    attachment_->engine().enqueue(send_lanes_[destination], operation);
  }
  attachment_->engine().begin(operation, issue.async);
  return operation;
}

// A direct message is one fragment that points to the sender's memory; any
// other is copied, fragment after fragment, into the channel's buffer, which is
// allocated with the first one.
Task Communicator::run_send(const char* data, Shape shape, int to, int tag) {
  auto& channel = memory_.channel(rank_, to);
  auto& segment = attachment_->segment();
  const uint64_t total = shape.bytes();
  Fragment piece{};
  piece.total = total;
  piece.tag = tag;
  piece.dtype = static_cast<uint8_t>(shape.dtype);
  piece.direct =
      total > kFragmentBytes && attachment_->locate(data, total, piece.offset);
  if (total > 0 && !piece.direct && channel.data.load() == 0) {
    channel.data.store(segment.allocate(kFragments * kFragmentBytes));
  }
  uint64_t position = 0;
  do {
    const uint64_t k = pieces_[to]++;
    if (k >= kFragments) {
      co_await Until{Readiness::reaches(channel.tail, k - kFragments + 1)};
    }
    piece.first = position == 0;
    piece.bytes =
        piece.direct ? total : std::min(kFragmentBytes, total - position);
    if (!piece.direct && piece.bytes > 0) {
      std::copy_n(
          data + position, piece.bytes,
          segment.at(channel.data) + k % kFragments * kFragmentBytes);
    }
    channel.fragments[k % kFragments] = piece;
    channel.head.store(k + 1, std::memory_order_seq_cst);
    if (to == rank_) {
      attachment_->engine().ring_self();
    } else {
      attachment_->engine().ring(ranks_[to]);
    }
    position += piece.bytes;
    if (piece.direct) {
      co_await Until{Readiness::reaches(channel.tail, k + 1)};
    }
  } while (position < total);
}

OperationPtr Communicator::receive(
    void* data, const Shape& shape, int source, int tag, Issue issue) {
  auto receive = std::make_shared<Receive>();
  receive->data = static_cast<char*>(data);
  receive->bytes = shape.bytes();
  receive->dtype = shape.dtype;
  receive->source = source;
  receive->tag = tag;
  auto operation = new_operation("recv", issue, source);
  operation->task = run_receive(*operation, receive);
  {
    std::lock_guard lock(mutex_);
    operation->sequence = received_++;
    mailbox_->post(receive);
    attachment_->engine().enqueue(std::make_shared<Lane>(), operation);
  }
  attachment_->engine().begin(operation, issue.async);
  return operation;
}

Task Communicator::run_receive(
    Operation& operation, std::shared_ptr<Receive> receive) {
  const Readiness something{
      [](const void* object, uint64_t) {
        const auto* receive = static_cast<const Receive*>(object);
        return receive->done.load(std::memory_order_acquire) ||
               receive->mailbox->arrived(receive->source);
      },
      receive.get(), 0};
  while (!receive->done) {
    if (mailbox_->pump(*receive)) {
      attachment_->engine().ring_self();
    }
    if (!receive->done) {
      co_await Until{something};
    }
  }
  if (!receive->error.empty()) {
    throw Mismatch(
        title(operation) + ": " + receive->error, operation.sequence,
        {receive->source});
  }
}

}  // namespace echelon::local
