// Connections that are not of this job, as the user is told of them.
#pragma once

#include <set>
#include <string>

namespace echelon::authentication {

/// The number of the address at one end of the connection `fd`; "?" when there
/// is none.
std::string address_of(int fd, bool peer);

/// Tells the user on stderr, once for an address, and of few addresses: there
/// may be many of them.
class Strangers {
 public:
  /// `reason`: why the connection `fd` is closed, as in "it has another key".
  void tell(int fd, const std::string& reason);

 private:
  std::set<std::string> told_;
};

}  // namespace echelon::authentication
