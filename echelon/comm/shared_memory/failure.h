// The errors between the ranks of one host, so that a caller can tell the cases
// apart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/error.h"

namespace echelon::local {

/// The base of all of them. After any but a Mismatch the group cannot be used.
class Failure : public CommError {
 public:
  Failure(
      const std::string& message, uint64_t sequence, std::vector<int> missing)
      : CommError(message), sequence_(sequence), missing_(std::move(missing)) {}
  /// The collective's number in its group, or the message's in its pair, from
  /// 0.
  uint64_t sequence() const { return sequence_; }
  /// The ranks of the group that are gone, have not arrived, or disagree.
  const std::vector<int>& missing() const { return missing_; }

 private:
  uint64_t sequence_;
  std::vector<int> missing_;
};

/// A peer's process or thread ended, or it left the job.
class PeerLost : public Failure {
  using Failure::Failure;
};

/// The ranks made different calls. Every rank gets the same text, and the group
/// stays usable.
class Mismatch : public Failure {
  using Failure::Failure;
};

/// The deadline passed; missing() did not arrive.
class Timeout : public Failure {
  using Failure::Failure;
};

/// Some rank gave up: Hub::abort.
class Aborted : public Failure {
  using Failure::Failure;
};

}  // namespace echelon::local
