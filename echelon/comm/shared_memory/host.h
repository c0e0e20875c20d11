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

/// Where ranks that are threads of this process find each other. Make one and
/// give it to each thread.
class Hub {
 public:
  virtual ~Hub() = default;
  /// Every pending and later operation of every rank fails with Aborted and
  /// this reason. Called for a rank that ended with an error; the first reason
  /// counts.
  virtual void abort(const std::string& reason) = 0;
};

/// A rank's attachment. Thread-safe. Owns the rank's progress thread; groups
/// keep their Host alive. When its last user is gone the rank has left: the
/// operations of other ranks that need it fail with PeerLost.
class Host {
 public:
  virtual ~Host() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Publishes a line about what this rank does, for the hang reports of the
  /// others. At most 4,080 bytes are kept.
  virtual void publish_status(std::string_view status) = 0;
  /// The last line of `rank`, even when it hangs or died; empty before the
  /// first.
  virtual std::string read_status(int rank) const = 0;
};

struct JoinOptions {
  /// Tensors of 64 KiB and more live in memory that every rank of the host
  /// maps, so that collectives work on them in place: 2 to 4 times as fast from
  /// 1 MiB on. Processes only. The memory is shared: a child of fork() does not
  /// have it, and it counts as shmem.
  bool share_tensors = false;
  /// How long to wait for the other ranks.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Tells glibc to keep freed memory, for this process, once. A training step
/// frees and allocates the same big blocks again and again; glibc gives them
/// back to the system each time, and the page faults cost more than the
/// communication (173 ms instead of 119 a step, measured on a network of 41 M
/// parameters). Every World, make_hub and join_processes call this; with
/// share_tensors the arena does it instead.
void keep_freed_memory();

std::shared_ptr<Hub> make_hub(int size);
/// Called once by each thread with its rank.
std::shared_ptr<Host> join_threads(std::shared_ptr<Hub> hub, int rank);

/// A key-value store through which processes find each other; all reach it.
struct Rendezvous {
  std::function<void(const std::string& key, const std::string& value)> set;
  /// Waits until the key exists; throws when the timeout passes.
  std::function<std::string(
      const std::string& key, std::chrono::milliseconds timeout)>
      get;
};

/// Called by each process of the host with its rank. `job_key` names the job
/// and its generation: a process of another one is refused. Throws Timeout with
/// the missing ranks, on every rank that came. Leaves nothing on disk.
std::shared_ptr<Host> join_processes(
    const Rendezvous& rendezvous, const std::string& job_key, int rank,
    int size, const JoinOptions& options);

}  // namespace echelon::local
