// A stand-in for the tests' device, for the CPU's tensors: its communicators
// have NCCL's manners and Gloo's sums. Ranks are threads of one process. The
// library has the name of the device's own, so the test that loads it first, by
// its path, finds it behind `[comm] device = "test"`.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace echelon::fake_accelerator {

/// A message of this tag throws when a batch takes it.
constexpr int kBrokenTag = 13;

/// What the ranks did, and how the device behaves.
struct Control {
  std::atomic<int> num_devices{8};
  /// While it is true, no call is complete, though wait() returns.
  std::atomic<bool> hold{false};

  void note(int device, const std::string& what) {
    const std::lock_guard lock(mutex_);
    notes_[device].push_back(what);
  }
  /// Of a device, in order: "set_device", then "<communicator> <call>", with
  /// the communicators numbered as the device made them.
  std::vector<std::string> notes(int device) {
    const std::lock_guard lock(mutex_);
    return notes_[device];
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    notes_.clear();
    num_devices = 8;
    hold = false;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<std::string>> notes_;
};

}  // namespace echelon::fake_accelerator
