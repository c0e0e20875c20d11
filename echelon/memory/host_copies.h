// Storages copied to the host and back, beside the computation. For
// activation_storage.cpp.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>

namespace echelon {

/// Bytes in the host's memory: pinned when they came from a GPU.
struct HostCopy {
  torch::Tensor bytes;
  c10::Device device;  // where they came from
};

/// Not thread-safe. Copies of a GPU run on a stream of their own; `current` is
/// the stream of the thread that calls.
class HostCopies {
 public:
  struct Fetched {
    c10::Storage storage;
    std::shared_ptr<c10::Event> arrived;  // null: it is there
  };

  /// The storage may be freed and written to by the current stream: what it
  /// then does comes after the copy.
  std::shared_ptr<HostCopy>
  put(const c10::Storage& storage, c10::Device device);
  /// Begins to copy it back to where it was.
  Fetched fetch(const HostCopy& copy);
  /// The current stream waits for it.
  void wait(const Fetched& fetched) const;

 private:
  struct Leaving {
    c10::Storage storage;
    c10::Stream from;
    std::shared_ptr<c10::Event> left;
  };

  const c10::Stream& side_stream(c10::Device device);
  void put_on_stream(
      const c10::Storage& storage, const HostCopy& copy, c10::Device device);
  void let_go(size_t at_most);

  std::map<c10::DeviceIndex, c10::Stream> side_streams_;
  std::deque<Leaving> leaving_;
};

}  // namespace echelon
