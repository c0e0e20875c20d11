// What can go wrong between the ranks of one host, named so that a caller can
// tell the cases apart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/error.h"

namespace echelon::local {

/// Base of all of them. Except after a Mismatch the group cannot be used again.
class Failure : public CommError {
 public:
  Failure(
      const std::string& message, uint64_t sequence, std::vector<int> missing)
      : CommError(message), sequence_(sequence), missing_(std::move(missing)) {}
  /// The collective's number in its group, from 0; of a message: in its pair.
  uint64_t sequence() const { return sequence_; }
  /// Ranks of the group that are gone, have not arrived, or disagree.
  const std::vector<int>& missing() const { return missing_; }

 private:
  uint64_t sequence_;
  std::vector<int> missing_;
};

/// A peer's process or thread ended, or it left the job.
class PeerLost : public Failure {
  using Failure::Failure;
};

/// Ranks called different things. Every rank gets the same text, and the group
/// stays usable.
class Mismatch : public Failure {
  using Failure::Failure;
};

/// The deadline passed; missing() did not arrive.
class Timeout : public Failure {
  using Failure::Failure;
};

/// Some rank gave up: Host::abort, Hub::abort, or a backend's abort.
class Aborted : public Failure {
  using Failure::Failure;
};

}  // namespace echelon::local
