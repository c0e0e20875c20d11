// Settings of the communicator.
#pragma once

#include <chrono>
#include <cstdint>

namespace echelon {

enum class BackendKind {
  automatic,  // nccl with a GPU per rank, local on one host, gloo otherwise
  local,      // ranks of one host, through their shared memory
  gloo,       // CPU tensors over any network
  nccl,       // GPU tensors
};

/// Where the tensors of a rank are.
enum class DeviceKind {
  automatic,  // a GPU where each rank of the host has one, else the CPU
  cpu,        // never a GPU
  cuda,       // a GPU for each rank; it is an error when there is none
  test,       // the device of Echelon's own tests
};

struct CommOptions {
  DeviceKind device = DeviceKind::automatic;
  BackendKind backend = BackendKind::automatic;
  /// A collective that takes longer fails on every rank that is in it.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// How long a rank waits for the others when the job starts.
  std::chrono::milliseconds rendezvous_timeout = std::chrono::minutes(2);
  /// `local` between processes: tensors of 64 KiB and more live in memory that
  /// every rank of the host maps, so that collectives work on them in place.
  /// That memory counts as shared, and a child of fork() does not inherit it.
  bool share_tensors = true;
  /// Compare operation, reduction, shape, dtype and label across ranks. `local`
  /// always does; on the others a collective costs a round trip to the store.
  bool check_collectives = false;
};

}  // namespace echelon
