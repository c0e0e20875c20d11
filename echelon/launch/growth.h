// Whether a job that runs should take in more hosts.
#pragma once

#include <string>

namespace echelon::launch {

/// A change of hosts, in seconds.
struct Growth {
  double step_now = 0;   // predicted; 0: not known
  double step_then = 0;  // with the hosts that have come; 0: not known
  double change = 0;     // in which no step is done
};

/// Why those hosts wait as spares; empty when they are taken in: the job is
/// then further after 10 minutes, or nothing is known.
std::string why_not_grow(const Growth& growth);

}  // namespace echelon::launch
