// One rank's record of its own and the others' collectives; the backends report
// their calls to it.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/comm/trace/record.h"
#include "echelon/comm/trace/status_board.h"

namespace echelon {

/// A group, as the observer knows it.
struct ObservedGroup {
  size_t number = 0;  // counted in the order in which all ranks create groups
  std::string axis;
  std::vector<int> ranks;  // world ranks
};

/// One call, from its begin to its end.
struct ObservedCall {
  uint64_t ticket = 0;
  CollectiveRecord record;
  const ObservedGroup* group = nullptr;
  bool collective = true;  // send and recv are not
};

/// Per rank; thread-safe.
class Observer {
 public:
  Observer(int rank, std::shared_ptr<StatusBoard> board);

  int rank() const { return rank_; }
  const History& history() const { return history_; }
  History& history() { return history_; }

  /// Fills in ticket and begin time.
  void begin(ObservedCall& call);
  void end(const ObservedCall& call, bool failed = false);

  /// The error that a failed call throws: a CommError that names the operation,
  /// axis and label and, when ranks had not arrived, what each of them did
  /// last.
  std::exception_ptr
  explain(const ObservedCall& call, const std::exception_ptr& cause) const;
  /// The hang report of a call in which others did not come in time.
  std::string hang_of(const ObservedCall& call) const;

 private:
  const int rank_;
  std::shared_ptr<StatusBoard> board_;
  History history_;
  std::mutex mutex_;
  RankStatus status_;
};

}  // namespace echelon
