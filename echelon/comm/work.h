// The handle of a collective that may still be running.
#pragma once

#include <memory>

namespace echelon {

/// What an asynchronous collective returns. Copies share one operation. The
/// tensors of the call are kept alive by the operation itself.
class Work {
 public:
  /// A finished operation.
  Work() = default;

  /// Returns when the result is in the tensors (on a GPU: when the current
  /// stream waits for it). Throws CommError when a peer was lost, ranks called
  /// different things, or the group's timeout passed. May be called again.
  void wait() const;

  /// True once wait() would return at once.
  bool done() const;

  struct Impl;
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace echelon
