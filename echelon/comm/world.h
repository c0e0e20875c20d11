// This rank's membership in the job: its rank, the world's size, its device.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/comm/trace/record.h"
#include "echelon/options/comm.h"

namespace echelon {

std::string to_string(BackendKind kind);  // "local"

/// What a group is for: anything, or nothing but send(), recv() and
/// batch_send_recv() beside computation.
enum class Traffic { any, messages };

/// A rank's membership. Moves, does not copy; groups keep alive what they need.
/// Destroying it leaves the job. With nccl it ends the communicators: it waits
/// until all ranks are there and their calls are over, unless an error is on
/// its way, and no group can be used afterwards.
class World {
 public:
  /// Joins the job that the launcher's environment names: `echelon run`,
  /// torchrun, srun or mpirun (see rank_environment.h for the variables);
  /// without a launcher, one process alone. Every rank calls this; it returns
  /// when all have. Throws ConfigError for variables that contradict each
  /// other, CommError when others do not come: the message names the missing
  /// ranks and the master's address.
  static World from_environment(const CommOptions& options = {});
  /// One process, no peers; on the CPU, unless the options ask for a GPU.
  static World alone(const CommOptions& options = {});

  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  int rank() const;
  int size() const;
  int local_rank() const;  // among the ranks of this host
  int local_size() const;
  int node_rank() const;
  /// Threads for this rank's computation: its share of the cores that the job
  /// may use on this host, by affinity and cgroup.
  int compute_threads() const;
  /// How often the job was restarted; a part of every key in the store.
  int generation() const;
  /// This rank's device: with the nccl backend the GPU of its host that its
  /// local rank takes, else the CPU. Joining makes it the calling thread's
  /// current device; a thread that the rank starts sets it for itself.
  torch::Device device() const;
  /// "local", "gloo" or "nccl": the backend of this world's tensors.
  std::string backend() const;
  const CommOptions& options() const;

  /// All ranks, axis "world".
  const Group& group() const;
  /// The group of `ranks` (world ranks). Every rank of the world calls this, in
  /// the same order. A rank outside of `ranks` may name the group that it is in
  /// instead (groups along an axis are disjoint); otherwise it gets a group of
  /// size 1. `backend`: if not the world's. On GPUs a group for messages has
  /// few blocks of threads, so that the messages leave the multiprocessors to
  /// the products beside them; it shares its communicator with such groups
  /// alone.
  Group new_group(
      const std::string& axis, const std::vector<int>& ranks,
      std::optional<BackendKind> backend = std::nullopt,
      Traffic traffic = Traffic::any);

  /// The last collectives of this rank, on all of its groups.
  const History& history() const;
  History& history();

  /// A small value from each rank, by rank: host names, versions, counts. It
  /// goes through the store, for set-up. Every rank calls this.
  std::vector<std::string> exchange(const std::string& value);

  /// The values of all ranks, by rank, on rank 0; nothing elsewhere. They go
  /// through the store, rank after rank, and may be large. Every rank calls
  /// this.
  std::vector<std::string> gather(const std::string& value);

  struct Impl;
  explicit World(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

/// Runs `body` on `num_ranks` threads of this process, each with a World of its
/// own, and returns when all have ended. Rethrows the first error (by time)
/// with its rank in front; the other ranks' collectives then fail at once.
void run_ranks(
    int num_ranks, const std::function<void(World&)>& body,
    const CommOptions& options = {});

}  // namespace echelon
