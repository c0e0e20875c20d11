// Graphs of the test device, with the manners of CUDA's:
//
// - While a stream is captured, its operations are kept and not run. A stream
//   that waits for a captured event is captured too.
// - The host may not wait for what is captured, nor ask it; a captured stream
//   may not wait for what was queued before. Copies from and to the host are
//   refused: a replay would use memory of the host that has been freed.
// - All streams must be joined when the capture ends.
// - Memory that captured operations allocate comes from the graph's own.
//
// A replay queues the operations again, each on its stream. It reports memory
// that was not the graph's and was freed since.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "echelon/comm/nccl/nccl_plugin.h"
#include "tests/test_device/runtime.h"

namespace echelon::test_device {

/// What a graph is made of, from begin() on.
class Capture {
 public:
  Capture(Device& device, int stream, int pool);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  bool has(int stream) const;
  int pool() const { return pool_; }

  void
  add(int stream, Launch launch, std::shared_ptr<const Operation> operation,
      std::function<void()> work);
  MarkPtr mark(int stream);
  void block(int stream, const Mark& mark);

  /// Throws when a stream is not joined.
  void end();
  void replay(int stream);

 private:
  /// An operation, a mark, or a wait for a mark.
  struct Node {
    int stream = 0;
    Launch launch;
    std::shared_ptr<const Operation> operation;
    std::function<void()> work;
    int recorded = -1;  // number of the mark
    int awaited = -1;
    /// Allocations that the operation uses and that are not the graph's.
    std::map<uintptr_t, uint64_t> foreign;
  };
  struct Stream {
    VectorClock clock;
    std::string last;  // operation
  };

  void check_memory(const Node& node) const;

  Device& device_;
  const int origin_;
  const int pool_;
  mutable std::mutex mutex_;
  std::map<int, Stream> streams_;
  std::vector<Node> nodes_;
  std::vector<MarkPtr> marks_;
};

std::unique_ptr<nccl::Graph> make_graph();

}  // namespace echelon::test_device
