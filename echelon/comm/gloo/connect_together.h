// The members of a group connect with each other: all of them, or none and
// again.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>

namespace echelon {

struct GroupMember {
  std::string group;  // "tp", for messages
  int rank = 0;       // in the group
  int size = 1;
};

using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>&)>;

/// What `connect` returns with a store of this attempt's own. On a host under
/// load the system can close a connection that is just being made; a member
/// that fails takes those down that are connected with it. So the members tell
/// each other how it went, and when one has failed all of them let go and
/// connect anew, three times at most; the first member says so on stderr. Every
/// member calls.
///
/// Throws what `connect` threw here when time is up or it was the last attempt;
/// CommError with another member's reason, or with the members that did not
/// come.
c10::intrusive_ptr<c10d::Backend> connect_together(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupMember& member,
    std::chrono::milliseconds timeout, const Connect& connect);

}  // namespace echelon
