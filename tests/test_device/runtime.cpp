#include "tests/test_device/runtime.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "echelon/text/format.h"
#include "tests/test_device/graph.h"

namespace echelon::test_device {
namespace {

constexpr int kPoolStreams = 4;

double now_seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Options& mutable_options() {
  static Options options = [] {
    Options first;
    if (const char* bytes = std::getenv("ECHELON_TEST_DEVICE_BYTES")) {
      first.memory_bytes = std::strtoll(bytes, nullptr, 10);
    }
    return first;
  }();
  return options;
}

struct Devices {
  std::mutex mutex;
  std::vector<std::unique_ptr<Device>> all;
};

// Leaked, as LibTorch's own devices are: tensors outlive static objects.
Devices& devices() {
  static auto* const all = new Devices;
  return *all;
}

struct Reports {
  std::mutex mutex;
  std::vector<Report> all;
};

Reports& reports() {
  static auto* const all = new Reports;
  return *all;
}

// "error 1 300": the 300th operation of device 1 fails. "hang 1 300": it never
// ends. "connect 1": no communicator of device 1 connects.
struct AskedFault {
  std::string kind;
  int device = -1;
  int64_t operation = 0;
};

const AskedFault& asked_fault() {
  static const AskedFault fault = [] {
    AskedFault asked;
    if (const char* text = std::getenv("ECHELON_TEST_DEVICE_FAULT")) {
      std::istringstream(text) >> asked.kind >> asked.device >> asked.operation;
    }
    return asked;
  }();
  return fault;
}

std::function<void()> faulty(const std::string& kind) {
  if (kind == "hang") {
    return [] {
      for (;;) ::pause();
    };
  }
  return [] {
    throw c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, 700,
        "CUDA error: an illegal memory access was encountered");
  };
}

std::atomic<bool> held{false};

thread_local int tls_device = 0;
thread_local std::vector<int> tls_streams;

std::string node_name() {
  const auto node = torch::autograd::get_current_node();
  return node ? node->name() : "";
}

}  // namespace

// ------------------------------------------------------------------ public

bool connects(int device) {
  return asked_fault().kind != "connect" || asked_fault().device != device;
}

void set_options(const Options& options) {
  mutable_options() = options;
}
const Options& options() {
  return mutable_options();
}

void keep_report(Report report) {
  std::lock_guard lock(reports().mutex);
  if (const char* file = std::getenv("ECHELON_TEST_DEVICE_REPORTS")) {
    std::ofstream(file, std::ios::app) << report.text << std::endl;
  }
  if (reports().all.size() < 100) reports().all.push_back(std::move(report));
}

std::vector<Report> take_reports() {
  std::lock_guard lock(reports().mutex);
  return std::exchange(reports().all, {});
}

Counts counts(int device) {
  Device& one = device_of(device);
  std::lock_guard lock(one.mutex());
  Counts result = one.counts;
  result.allocated_bytes = one.in_use;
  return result;
}

void reset_counts(int device) {
  Device& one = device_of(device);
  std::lock_guard lock(one.mutex());
  one.counts = {};
  one.counts.peak_bytes = one.in_use;
}

std::vector<std::string> calls(int device) {
  Device& one = device_of(device);
  std::lock_guard lock(one.mutex());
  return one.calls;
}

void reset_calls() {
  hold(false);
  for (int index = 0; index < num_devices(); ++index) {
    Device& one = device_of(index);
    std::lock_guard lock(one.mutex());
    one.calls.clear();
    one.num_communicators = 0;
  }
}

void hold(bool value) {
  held = value;
}

void wait_while_held(const std::atomic<bool>& aborted) {
  while (held && !aborted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void drain(int device) {
  device_of(device).drain();
}

void clear_error(int device) {
  device_of(device).clear_error();
}

// -------------------------------------------------------------------- marks

void Mark::reach() {
  {
    std::lock_guard lock(mutex_);
    seconds_ = now_seconds();
    reached_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void Mark::wait() const {
  if (reached()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached(); });
}

// ------------------------------------------------------------------- queues

Queue::~Queue() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Queue::push(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
}

bool Queue::empty() const {
  std::lock_guard lock(mutex_);
  return work_.empty() && !busy_;
}

void Queue::run() {
  // The first call in a thread takes the process's number, once.
  at::get_num_threads();
  at::set_num_threads(1);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return end_ || !work_.empty(); });
    if (work_.empty()) return;
    auto work = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    try {
      work();
    } catch (...) {
      device_.fail(std::current_exception());
    }
    work = nullptr;
    lock.lock();
    busy_ = false;
  }
}

// ------------------------------------------------------------------- device

Queue& Device::queue(int stream) {
  const auto index = static_cast<size_t>(stream);
  while (queues_.size() <= index) {
    queues_.push_back(std::make_unique<Queue>(*this));
    clocks_.emplace_back();
  }
  return *queues_[index];
}

int Device::new_stream() {
  std::lock_guard lock(mutex_);
  const auto again = std::ranges::find_if(ended_, [&](int stream) {
    const auto at = static_cast<size_t>(stream);
    return queues_[at]->empty() && host_.at(at) >= clocks_[at].at(at);
  });
  if (again != ended_.end()) {
    const int stream = *again;
    ended_.erase(again);
    return stream;
  }
  queue(std::max<int>(kPoolStreams, static_cast<int>(queues_.size())));
  return static_cast<int>(queues_.size()) - 1;
}

void Device::end_stream(int stream) {
  std::lock_guard lock(mutex_);
  ended_.push_back(stream);
}

int Device::stream_of_pool(bool) {
  std::lock_guard lock(mutex_);
  queue(kPoolStreams);
  return 1 + static_cast<int>(next_of_pool_++ % kPoolStreams);
}

void Device::launch(int stream, Launch launch, std::function<void()> work) {
  check();
  auto operation = std::make_shared<Operation>();
  operation->name = launch.name;
  operation->label = launch.label;
  operation->node = node_name();
  operation->stream = stream;
  operation->stack = CallStack::here();
  if (const auto capture = capture_of(stream)) {
    TORCH_CHECK(
        launch.host_uses.empty(), "operation not permitted when stream is ",
        "capturing: ", launch.name, " uses memory of the host");
    capture->add(
        stream, std::move(launch), std::move(operation), std::move(work));
    return;
  }
  {
    std::unique_lock lock(mutex_);
    if (capture_ && options().sanitize) {
      lock.unlock();
      add_report(
          Finding::outside_capture,
          format(
              "{} on stream {} is queued while another stream is captured, and "
              "no graph has it:\n{}",
              operation->name, stream, operation->stack.text()));
    }
  }
  enqueue(stream, launch, operation, std::move(work));
}

void Device::replay(
    int stream, const Launch& launch,
    const std::shared_ptr<const Operation>& operation,
    const std::function<void()>& work) {
  check();
  enqueue(stream, launch, operation, work);
}

void Device::enqueue(
    int stream, const Launch& launch,
    const std::shared_ptr<const Operation>& operation,
    std::function<void()> work) {
  if (launch.make_work) work = launch.make_work();
  std::vector<std::string> conflicts;
  {
    std::lock_guard lock(mutex_);
    Queue& to = queue(stream);
    VectorClock& clock = clocks_[static_cast<size_t>(stream)];
    clock.merge(host_);
    const uint64_t time = clock.at(static_cast<size_t>(stream)) + 1;
    clock.set(static_cast<size_t>(stream), time);
    if (launch.collective) {
      ++counts.collectives;
    } else {
      ++counts.launches;
    }
    if (asked_fault().device == index_ && asked_fault().operation > 0 &&
        ++launched_ == asked_fault().operation) {
      work = faulty(asked_fault().kind);
    }
    if (options().sanitize) {
      conflicts = sanitizer_.access(operation, time, clock, launch.accesses);
      for (const HostUse& use : launch.host_uses) {
        host_pending_.push_back({use, stream, time, operation});
        protect(use);
      }
    }
    to.push(std::move(work));
  }
  for (auto& text : conflicts) {
    add_report(Finding::unordered_access, std::move(text));
  }
}

void Device::set_capture(std::shared_ptr<Capture> capture) {
  std::lock_guard lock(mutex_);
  capture_ = std::move(capture);
}

std::shared_ptr<Capture> Device::capture_of(int stream) {
  std::lock_guard lock(mutex_);
  return capture_ && capture_->has(stream) ? capture_ : nullptr;
}

void Device::refuse_in_capture(int stream, const std::string& call) {
  TORCH_CHECK(
      !capture_of(stream),
      "operation not permitted when stream is capturing: ", call);
}

MarkPtr Device::mark(int stream) {
  if (const auto capture = capture_of(stream)) return capture->mark(stream);
  std::lock_guard lock(mutex_);
  Queue& to = queue(stream);
  VectorClock clock = clocks_[static_cast<size_t>(stream)];
  clock.merge(host_);
  auto mark = std::make_shared<Mark>(stream, std::move(clock));
  to.push([mark] { mark->reach(); });
  return mark;
}

void Device::block(int stream, const MarkPtr& mark) {
  {
    std::unique_lock lock(mutex_);
    const auto capture = capture_;
    lock.unlock();
    const bool captured = capture && capture->has(stream);
    TORCH_CHECK(
        mark->capture() == nullptr || mark->capture() == capture.get(),
        "dependency created on an event of a capture that is over");
    TORCH_CHECK(
        !captured || mark->capture() != nullptr,
        "dependency created on uncaptured work in another stream");
    if (mark->capture() != nullptr) return capture->block(stream, *mark);
  }
  std::lock_guard lock(mutex_);
  Queue& to = queue(stream);
  clocks_[static_cast<size_t>(stream)].merge(mark->clock());
  if (mark->stream() == stream || mark->reached()) return;
  to.push([mark] { mark->wait(); });
}

void Device::wait(const MarkPtr& mark, const std::string& call) {
  TORCH_CHECK(
      mark->capture() == nullptr,
      "operation not permitted on an event last recorded in a capturing "
      "stream: ",
      call);
  if (!call.empty()) count_wait(call);
  mark->wait();
  learn(mark->clock());
  check();
}

bool Device::query(const MarkPtr& mark) {
  check();
  TORCH_CHECK(
      mark->capture() == nullptr,
      "operation not permitted on an event last recorded in a capturing "
      "stream: query");
  if (!mark->reached()) return false;
  learn(mark->clock());
  return true;
}

void Device::learn(const VectorClock& clock) {
  std::lock_guard lock(mutex_);
  host_.merge(clock);
  release_host_uses();
}

void Device::synchronize(const std::string& call) {
  {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(
        !capture_, "operation not permitted when stream is capturing: ", call);
  }
  if (!call.empty()) count_wait(call);
  size_t streams = 0;
  {
    std::lock_guard lock(mutex_);
    streams = queues_.size();
  }
  for (size_t i = 0; i < streams; ++i) wait(mark(static_cast<int>(i)), "");
}

void Device::drain() {
  size_t streams = 0;
  {
    std::lock_guard lock(mutex_);
    streams = queues_.size();
  }
  for (size_t i = 0; i < streams; ++i) mark(static_cast<int>(i))->wait();
}

bool Device::idle(int stream) {
  std::lock_guard lock(mutex_);
  return queue(stream).empty();
}

void Device::note(const std::string& call) {
  std::lock_guard lock(mutex_);
  calls.push_back(call);
}

void Device::count_wait(const std::string& call) {
  const std::string stack = CallStack::here().text();
  std::lock_guard lock(mutex_);
  counts.host_waits.push_back({call, stack});
}

void Device::add_report(Finding finding, std::string text) {
  keep_report({finding, index_, std::move(text)});
}

void Device::fail(std::exception_ptr error) {
  std::lock_guard lock(error_mutex_);
  if (!error_) error_ = std::move(error);
  has_error_ = true;
}

void Device::check() const {
  if (!has_error_) return;
  std::exception_ptr error;
  {
    std::lock_guard lock(error_mutex_);
    error = error_;
  }
  std::rethrow_exception(error);
}

void Device::clear_error() {
  std::lock_guard lock(error_mutex_);
  error_ = nullptr;
  has_error_ = false;
}

// ------------------------------------------------------------- pinned memory

void Device::protect(const HostUse& use) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = use.begin & ~(page - 1);
  const uintptr_t end = (use.begin + use.bytes + page - 1) & ~(page - 1);
  // The host may read what the device only reads.
  ::mprotect(
      reinterpret_cast<void*>(begin), end - begin,
      use.device_writes ? PROT_NONE : PROT_READ);
}

// Gives the host the memory of copies that it knows to be over.
void Device::release_host_uses() {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  std::vector<HostUse> over;
  std::erase_if(host_pending_, [&](const HostPending& pending) {
    const bool known =
        host_.at(static_cast<size_t>(pending.stream)) >= pending.time;
    if (known) over.push_back(pending.use);
    return known;
  });
  for (const HostUse& use : over) {
    const uintptr_t begin = use.begin & ~(page - 1);
    const uintptr_t end = (use.begin + use.bytes + page - 1) & ~(page - 1);
    ::mprotect(
        reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE);
  }
  if (over.empty()) return;
  for (const HostPending& pending : host_pending_) protect(pending.use);
}

// Runs in a signal handler of a thread that was not inside the device.
bool Device::host_touched(uintptr_t address, std::string& text) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  bool found = false;
  for (const HostPending& pending : host_pending_) {
    const uintptr_t begin = pending.use.begin & ~(page - 1);
    const uintptr_t end = pending.use.begin + pending.use.bytes;
    const uintptr_t last = (end + page - 1) & ~(page - 1);
    if (address < begin || address >= last) continue;
    found = true;
    ::mprotect(
        reinterpret_cast<void*>(begin), last - begin, PROT_READ | PROT_WRITE);
    // The rest of a page is nobody's, or another copy's.
    if (address < pending.use.begin || address >= end || !text.empty()) {
      continue;
    }
    text = format(
        "the host touches pinned memory while {} on stream {} {} it:\n{}    "
        "the copy:\n{}",
        pending.operation->name, pending.stream,
        pending.use.device_writes ? "writes" : "reads",
        CallStack::here().text(), pending.operation->stack.text());
  }
  return found;
}

// -------------------------------------------------------------------- places

Device& device_of(int index) {
  auto& all = devices();
  std::lock_guard lock(all.mutex);
  while (static_cast<int>(all.all.size()) <= index) {
    all.all.push_back(
        std::make_unique<Device>(static_cast<int>(all.all.size())));
  }
  return *all.all[static_cast<size_t>(index)];
}

int num_devices() {
  return options().num_devices;
}

int current_device() {
  return tls_device;
}
void set_current_device(int index) {
  TORCH_CHECK(
      index >= 0 && index < num_devices(),
      "test device: invalid device ordinal ", index, "; there are ",
      num_devices());
  tls_device = index;
}

int current_stream(int device) {
  const auto index = static_cast<size_t>(device);
  return index < tls_streams.size() ? tls_streams[index] : 0;
}

int exchange_current_stream(int device, int stream) {
  const auto index = static_cast<size_t>(device);
  if (index >= tls_streams.size()) tls_streams.resize(index + 1, 0);
  return std::exchange(tls_streams[index], stream);
}

c10::Stream stream_of(int device, int stream) {
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(
          c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
      stream);
}

}  // namespace echelon::test_device
