// Devices, streams and events of the test device, and the order of what runs on
// them.
//
// A stream is a queue with a thread. An operation is queued by launch(): its
// accesses go to the sanitizer at once, its work runs on the stream's thread
// when the operations before it are over. A Mark is a point in a stream, what
// an event holds after record(): the stream's thread reaches it when all before
// it is done.
//
// An error in queued work is kept by the device and thrown by every later call,
// as an asynchronous error of CUDA is.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/test_device/device.h"
#include "tests/test_device/sanitizer.h"

namespace echelon::test_device {

class Capture;
class Device;

/// A point in a stream.
class Mark {
 public:
  Mark(int stream, VectorClock clock)
      : stream_(stream), clock_(std::move(clock)) {}
  /// The point of a capture's stream that comes behind its operations so far.
  Mark(int stream, VectorClock clock, const Capture* capture, size_t place)
      : stream_(stream),
        clock_(std::move(clock)),
        capture_(capture),
        place_(place) {}

  /// Null for a point that a stream comes to. The capture may be over.
  const Capture* capture() const { return capture_; }
  size_t place() const { return place_; }  // among the capture's marks

  bool reached() const { return reached_.load(std::memory_order_acquire); }
  void reach();
  /// Blocks the calling thread; not counted.
  void wait() const;
  int stream() const { return stream_; }
  const VectorClock& clock() const { return clock_; }
  double seconds() const { return seconds_; }  // when it was reached

 private:
  const int stream_;
  const VectorClock clock_;
  const Capture* const capture_ = nullptr;
  const size_t place_ = 0;
  double seconds_ = 0;
  std::atomic<bool> reached_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
};

using MarkPtr = std::shared_ptr<Mark>;

/// A thread that runs what is queued, in order.
class Queue {
 public:
  explicit Queue(Device& device) : device_(device) {}
  ~Queue();
  void push(std::function<void()> work);
  bool empty() const;

 private:
  void run();

  Device& device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  bool end_ = false;
  std::thread thread_;
};

/// Host memory that a queued copy reads or writes: the host may not touch it
/// before it knows that the copy is over.
struct HostUse {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool device_writes = false;
};

struct Launch {
  std::string name;
  std::string label;
  std::vector<Access> accesses;
  std::vector<HostUse> host_uses;
  bool collective = false;
  /// Makes the work each time that it is queued, for work that a replay does
  /// not repeat as it was.
  std::function<std::function<void()>()> make_work;
};

class Device {
 public:
  explicit Device(int index) : index_(index) {}
  int index() const { return index_; }

  /// Queues an operation on `stream`, or gives it to the capture that has the
  /// stream.
  void launch(int stream, Launch launch, std::function<void()> work);
  /// Queues an operation that was captured. `operation`: as it was then.
  void replay(
      int stream, const Launch& launch,
      const std::shared_ptr<const Operation>& operation,
      const std::function<void()>& work);

  /// From now on the stream's operations go to `capture`; null: nobody's do.
  void set_capture(std::shared_ptr<Capture> capture);
  /// The capture of the stream; null: it has none.
  std::shared_ptr<Capture> capture_of(int stream);
  /// Throws if `stream` is captured.
  void refuse_in_capture(int stream, const std::string& call);
  /// A mark after all that `stream` has queued.
  MarkPtr mark(int stream);
  /// Makes `stream` wait for `mark`.
  void block(int stream, const MarkPtr& mark);
  /// Blocks the host until `mark` is reached. `call` names the wait in Counts;
  /// empty: not counted.
  void wait(const MarkPtr& mark, const std::string& call);
  /// Whether `mark` is reached. If so, the host's later launches come after it.
  bool query(const MarkPtr& mark);
  void synchronize(const std::string& call);
  /// The host learns nothing from it.
  void drain();
  bool idle(int stream);
  /// The host knows, by other means, that `clock` is over.
  void learn(const VectorClock& clock);

  int new_stream();
  /// Nothing will be launched on `stream`, so new_stream() may return it again
  /// once the host knows that its work is over: what comes then is ordered.
  void end_stream(int stream);
  int stream_of_pool(bool high_priority);

  /// Counts a wait of the host that is none of wait()'s.
  void count_wait(const std::string& call);
  void add_report(Finding finding, std::string text);

  void fail(std::exception_ptr error);
  void check() const;
  void clear_error();
  bool failed() const { return has_error_; }

  /// Whether the page of this pinned address is in a queued copy. If so, the
  /// host gets the page back, and `text` tells about the copy if it uses the
  /// address itself. For the handler of a fault.
  bool host_touched(uintptr_t address, std::string& text);

  std::mutex& mutex() { return mutex_; }
  void note(const std::string& call);
  std::vector<std::string> calls;  // under mutex()
  int num_communicators = 0;       // since reset_calls(), under mutex()
  Counts counts;                   // under mutex()
  int64_t in_use = 0;              // bytes of the allocator, under mutex()

 private:
  Queue& queue(int stream);
  void enqueue(
      int stream, const Launch& launch,
      const std::shared_ptr<const Operation>& operation,
      std::function<void()> work);
  void protect(const HostUse& use);
  void release_host_uses();

  const int index_;
  std::mutex mutex_;
  std::shared_ptr<Capture> capture_;  // under mutex_
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<VectorClock> clocks_;  // by stream
  std::vector<int> ended_;           // streams
  VectorClock host_;
  Sanitizer sanitizer_;
  struct HostPending {
    HostUse use;
    int stream;
    uint64_t time;
    std::shared_ptr<const Operation> operation;
  };
  std::list<HostPending> host_pending_;
  int64_t launched_ = 0;  // operations since the device was made
  std::vector<int> pool_;
  size_t next_of_pool_ = 0;
  mutable std::mutex error_mutex_;
  std::exception_ptr error_;
  std::atomic<bool> has_error_{false};
};

/// Returns when work is not held, or `aborted`.
void wait_while_held(const std::atomic<bool>& aborted);

/// False where ECHELON_TEST_DEVICE_FAULT is "connect DEVICE".
bool connects(int device);

Device& device_of(int index);
int num_devices();
/// The calling thread's device and streams.
int current_device();
void set_current_device(int index);
int current_stream(int device);
int exchange_current_stream(int device, int stream);

inline Device& here() {
  return device_of(current_device());
}
c10::Stream stream_of(int device, int stream);

void keep_report(Report report);

}  // namespace echelon::test_device
