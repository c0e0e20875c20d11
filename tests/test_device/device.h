// A device for tests that behaves like a GPU, on CPUs: LibTorch's PrivateUse1
// as libechelon_test_device.so, which `[comm] device = "test"` loads in place
// of NCCL's library.
//
// What a GPU does and a CPU does not is what it is for:
//
// - Its memory cannot be touched by the host. Its pages have no rights; the
//   kernels use a second mapping of the same pages. A host access ends the
//   process with the tensor's size and operator.
// - Work is queued. Each stream is a thread with a queue; an operator allocates
//   its results, whose shapes the meta device knows, queues the CPU's kernel
//   and returns. Events order streams.
// - Freed memory is reused at once by the stream that it was allocated on, and
//   a device has a limit.
// - Collectives have the manners of ProcessGroupNCCL (process_group.cpp).
//
// Beside the queues, a sanitizer follows which accesses are ordered
// (sanitizer.h): it finds a missing event, wait or recordStream whether or not
// the accesses met in this run.
//
// Each rank has a device of its own, with its local rank as index. Ranks may be
// threads of one process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::test_device {

struct Options {
  int num_devices = 8;
  /// Memory of a device. Reading the environment's ECHELON_TEST_DEVICE_BYTES
  /// gives another default.
  int64_t memory_bytes = int64_t{2} << 30;
  bool sanitize = true;
  /// Devices whose communicators register no memory, as those of GPUs without
  /// multicast.
  std::vector<int> without_registration = {};
};

/// Applies to what is allocated and launched afterwards; `num_devices` and
/// `memory_bytes` must be set before the first use.
void set_options(const Options& options);
const Options& options();

/// What the sanitizer found.
enum class Finding {
  unordered_access,    // of device memory, by two streams
  early_host_access,   // of pinned memory, while a copy is under way
  communicator_order,  // two ranks use two communicators in different orders
  outside_capture,     // work that a step gives to a stream that no graph has
  freed_in_graph,      // a replay uses memory that was freed
  mixed_registration   // a collective has registered memory on some ranks alone
};

/// A program that a test starts writes them to the file
/// ECHELON_TEST_DEVICE_REPORTS, and has the fault ECHELON_TEST_DEVICE_FAULT:
/// "error 1 300" or "hang 1 300", the 300th operation of device 1 fails, or
/// never ends; or "connect 1", no communicator of device 1 connects.
struct Report {
  Finding finding = Finding::unordered_access;
  int device = 0;
  /// Both accesses with operator, tensor, stream and call stack.
  std::string text;
};

/// The reports since the last call, oldest first; at most 100 are kept.
std::vector<Report> take_reports();

/// A wait of the host for the device.
struct HostWait {
  std::string call;   // "item", "copy to the host", "synchronize", …
  std::string stack;  // the functions that led to it
};

struct Counts {
  int64_t launches = 0;     // kernels: operators and copies, also of replays
  int64_t replays = 0;      // of graphs
  int64_t collectives = 0;  // queued on this device
  /// All-gathers that write memory which their communicator has registered, and
  /// reduce-scatters that read it.
  int64_t registered = 0;
  int64_t unregistered = 0;  // the other all-gathers and reduce-scatters
  int64_t copied_to_device_bytes = 0;
  int64_t copied_to_host_bytes = 0;
  int64_t allocations = 0;
  int64_t allocated_bytes = 0;
  int64_t peak_bytes = 0;
  std::vector<HostWait> host_waits;
};

/// Since the last reset_counts() of the device; `allocated_bytes` is of now.
Counts counts(int device);
void reset_counts(int device);

/// What a rank asked of its device, in order: "set_device", "synchronize", and
/// "<communicator> <call>", with the communicators numbered as the device made
/// them. Since the last reset_calls().
std::vector<std::string> calls(int device);
/// Forgets the calls of all devices, and lets held work run.
void reset_calls();
/// Work of communicators that is queued while this holds does not begin before
/// it is let go or the communicator is aborted.
void hold(bool held);
/// A message with this tag throws when a batch takes it.
constexpr int kBrokenTag = 13;

/// Waits until all queues of the device are empty, without being counted.
void drain(int device);

/// Forgets the error of a device, which every later call would throw.
void clear_error(int device);

}  // namespace echelon::test_device
