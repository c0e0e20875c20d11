#include "tests/test_device/graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "echelon/text/format.h"
#include "tests/test_device/memory.h"

namespace echelon::test_device {

Capture::Capture(Device& device, int stream, int pool)
    : device_(device), origin_(stream), pool_(pool) {
  streams_[stream];
}

// Memory that waits for a captured stream is free when the graph is gone.
Capture::~Capture() {
  for (const auto& mark : marks_) mark->reach();
}

bool Capture::has(int stream) const {
  const std::lock_guard lock(mutex_);
  return streams_.contains(stream);
}

void Capture::add(
    int stream, Launch launch, std::shared_ptr<const Operation> operation,
    std::function<void()> work) {
  Node node{
      .stream = stream,
      .launch = std::move(launch),
      .operation = std::move(operation),
      .work = std::move(work)};
  for (const Access& access : node.launch.accesses) {
    if (access.begin == access.end) continue;
    const auto [pool, serial] = allocation_of(access.begin);
    if (pool != pool_) node.foreign[access.begin] = serial;
  }
  const std::lock_guard lock(mutex_);
  Stream& to = streams_.at(stream);
  const auto index = static_cast<size_t>(stream);
  to.clock.set(index, to.clock.at(index) + 1);
  to.last = node.operation->name;
  nodes_.push_back(std::move(node));
}

MarkPtr Capture::mark(int stream) {
  const std::lock_guard lock(mutex_);
  marks_.push_back(std::make_shared<Mark>(
      stream, streams_.at(stream).clock, this, marks_.size()));
  nodes_.push_back(
      {.stream = stream, .recorded = static_cast<int>(marks_.size()) - 1});
  return marks_.back();
}

void Capture::block(int stream, const Mark& mark) {
  const std::lock_guard lock(mutex_);
  streams_[stream].clock.merge(mark.clock());
  nodes_.push_back(
      {.stream = stream, .awaited = static_cast<int>(mark.place())});
}

void Capture::end() {
  const std::lock_guard lock(mutex_);
  const VectorClock& all = streams_.at(origin_).clock;
  for (const auto& [stream, one] : streams_) {
    const auto index = static_cast<size_t>(stream);
    TORCH_CHECK(
        all.at(index) >= one.clock.at(index),
        "capturing stream has unjoined work: ", one.last, " on stream ",
        stream);
  }
}

void Capture::check_memory(const Node& node) const {
  for (const auto& [address, serial] : node.foreign) {
    if (allocation_of(address).second == serial) continue;
    device_.add_report(
        Finding::freed_in_graph,
        format(
            "a replay of {} uses memory that was freed after it was "
            "captured:\n{}",
            node.operation->name, node.operation->stack.text()));
    return;
  }
}

void Capture::replay(int stream) {
  TORCH_CHECK(
      stream == origin_, "test device: a graph of stream ", origin_,
      " is replayed on stream ", stream);
  const MarkPtr begin = device_.mark(stream);
  for (const auto& [other, _] : streams_) {
    if (other != stream) device_.block(other, begin);
  }
  std::vector<MarkPtr> marks(marks_.size());
  for (const Node& node : nodes_) {
    if (node.recorded >= 0) {
      marks[static_cast<size_t>(node.recorded)] = device_.mark(node.stream);
    } else if (node.awaited >= 0) {
      device_.block(node.stream, marks[static_cast<size_t>(node.awaited)]);
    } else {
      check_memory(node);
      device_.replay(node.stream, node.launch, node.operation, node.work);
    }
  }
  for (const auto& [other, _] : streams_) {
    if (other != stream) device_.block(stream, device_.mark(other));
  }
}

namespace {

/// The memory of one graph, or of several.
struct Pool {
  Pool() : number(next()) {}
  ~Pool() { end_pool(number); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  static int next() {
    static std::atomic<int> last{0};
    return ++last;
  }
  const int number;
};

class TestGraph final : public nccl::Graph {
 public:
  void begin(const nccl::Graph* before) override {
    Device& device = here();
    const int stream = current_stream(device.index());
    TORCH_CHECK(
        stream != 0,
        "CUDA graphs must be captured on a non-default stream. (However, after "
        "capture, it's ok to replay them on the default stream.)");
    pool_ = before == nullptr ? std::make_shared<Pool>()
                              : static_cast<const TestGraph*>(before)->pool_;
    begin_pool(pool_->number);
    capture_ = std::make_shared<Capture>(device, stream, pool_->number);
    device.set_capture(capture_);
  }
  void end() override {
    here().set_capture(nullptr);
    capture_->end();
  }
  void replay() override {
    Device& device = here();
    {
      const std::lock_guard lock(device.mutex());
      ++device.counts.replays;
    }
    capture_->replay(current_stream(device.index()));
  }

 private:
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<Capture> capture_;
};

}  // namespace

std::unique_ptr<nccl::Graph> make_graph() {
  return std::make_unique<TestGraph>();
}

}  // namespace echelon::test_device
