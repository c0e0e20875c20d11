// One rank's attachment to the ranks of its host: threads of one process, which
// use each other's memory in place, or processes, which share a memory file.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace echelon::local {

class Engine;

/// The meeting place of ranks that are threads of this process. Make one, give
/// it to each thread.
class Hub {
 public:
  virtual ~Hub() = default;
  virtual int size() const = 0;
  /// Every pending and later operation of every rank fails with Aborted and
  /// this reason: for a rank that ended with an error. The first reason counts.
  virtual void abort(const std::string& reason) = 0;
};

/// A rank's attachment. Thread-safe. Owns the rank's progress thread; groups
/// keep their Host alive. When the last user is gone the rank has left:
/// operations of others that need it fail with PeerLost.
class Host {
 public:
  virtual ~Host() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Every pending and later operation of every rank on this host fails with
  /// Aborted and this reason. The first reason counts.
  virtual void abort(const std::string& reason) = 0;
  /// A line about what this rank does, for the hang reports of the others; at
  /// most 4,080 bytes are kept.
  virtual void publish_status(std::string_view status) = 0;
  /// The last line of `rank`, also of one that hangs or died; empty before the
  /// first.
  virtual std::string read_status(int rank) const = 0;
};

struct JoinOptions {
  /// Tensors of 64 KiB and more live in memory that every rank of the host
  /// maps, so that collectives work on them in place: 2 to 4 times as fast from
  /// 1 MiB on. Processes only. The memory is shared: a child of fork() does not
  /// have it, and it counts as shmem.
  bool share_tensors = false;
  /// For all ranks to come.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

std::shared_ptr<Hub> make_hub(int size);
/// Called once by each thread with its rank.
std::shared_ptr<Host> join_threads(std::shared_ptr<Hub> hub, int rank);

/// Where processes find each other: a key-value store that all of them reach.
struct Rendezvous {
  std::function<void(const std::string& key, const std::string& value)> set;
  /// Waits until the key is there; throws when the timeout passes.
  std::function<std::string(
      const std::string& key, std::chrono::milliseconds timeout)>
      get;
};

/// Called by each process of the host with its rank. `job_key` names the job
/// and its generation: a process of another life is turned away. Throws Timeout
/// with the ranks that did not come, on every rank that did. Nothing is left on
/// disk.
std::shared_ptr<Host> join_processes(
    const Rendezvous& rendezvous, const std::string& job_key, int rank,
    int size, const JoinOptions& options);

}  // namespace echelon::local
