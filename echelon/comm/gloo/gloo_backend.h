// The `gloo` backend, LibTorch's own, for CPU tensors over any network, and the
// way in which all members of a group connect.
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

/// Returns the result of `connect`, called with a store of this attempt alone.
/// On a host under load the system can close a connection while it is being
/// made, and a member that fails breaks the connections of the others. So the
/// members exchange their results; when one has failed, all drop their backends
/// and connect again, three times at most, and the first member prints a
/// warning to stderr. Every member calls.
///
/// Rethrows the exception of `connect` when the time is up or the last attempt
/// failed; throws a CommError with another member's reason, or with the members
/// that did not come.
c10::intrusive_ptr<c10d::Backend> connect_together(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupMember& member,
    std::chrono::milliseconds timeout, const Connect& connect);

/// Turns LibTorch's flight recorder off, unless TORCH_FR_BUFFER_SIZE is set: it
/// is not safe with Gloo groups in several threads, as of a saver beside
/// training (its map is written outside of its lock). The World's history takes
/// its place. Call it before the first group is made and threads are started.
void avoid_flight_recorder();

/// Connects `size` ranks with each other; every member calls. `address` is the
/// local address that the others can reach ("127.0.0.1" on one host). Throws
/// what LibTorch throws when a peer does not come within the timeout.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const std::string& address, std::chrono::milliseconds timeout);

}  // namespace echelon
