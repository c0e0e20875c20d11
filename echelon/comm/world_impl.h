// The members of a World; for the files of comm/ and tests alone, since they
// have c10d's types.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/communicators.h"
#include "echelon/comm/local/local.h"
#include "echelon/comm/nccl/choose_gpu.h"
#include "echelon/comm/observer.h"
#include "echelon/comm/world.h"
#include "echelon/environment/rank_environment.h"

namespace echelon {

struct World::Impl {
  /// In the store: a rank that is a thread has failed.
  static constexpr const char* kFailed = "failed";

  RankEnvironment env;
  CommOptions options;
  BackendKind kind = BackendKind::local;
  std::optional<int> device_index;  // on an accelerator
  torch::Device device = torch::kCPU;
  std::string address = "127.0.0.1";      // this host, as peers see it
  c10::intrusive_ptr<c10d::Store> store;  // null for one rank
  std::shared_ptr<local::Host> host;      // ranks of one host
  std::shared_ptr<local::Hub> hub;        // ranks that are threads
  std::shared_ptr<Observer> observer;
  // On accelerators; shared with the other ranks of the process.
  std::shared_ptr<Communicators> communicators =
      std::make_shared<Communicators>();
  const int exceptions_at_start = std::uncaught_exceptions();
  size_t num_groups = 0;
  size_t num_exchanges = 0;
  std::optional<Group> group;

  /// Chooses the backend and the device by the options and by the GPUs that the
  /// ranks of the job see (not asked for: empty).
  void choose(const std::vector<RankGpus>& gpus);
  /// With an accelerator: makes it the calling thread's current device.
  void use_accelerator();
  /// The communicator of `ranks`, connected.
  c10::intrusive_ptr<c10d::Backend> communicator(
      const std::vector<int>& ranks, int rank,
      const c10::intrusive_ptr<c10d::Store>& group_store, Traffic traffic);
  /// What happens when a call on the device is lost.
  void watch_device();
  /// Whether an error ends this rank.
  bool failing() const {
    return std::uncaught_exceptions() > exceptions_at_start;
  }
  /// Ends the communicators, with the other ranks unless one has failed.
  void end_communicators() noexcept;
  /// Returns when all ranks have called it; false when one has failed.
  bool meet(const std::string& place);
  /// Joins the ranks of this host; all of them call.
  void join_host();
  /// A group of `ranks`; every rank of the world calls.
  Group make(
      const std::string& axis, const std::vector<int>& ranks,
      BackendKind backend, Traffic traffic = Traffic::any);

  /// [0, size)
  static std::vector<int> all_ranks(int size);
};

namespace detail {

/// run_ranks() with a store that the caller gives: tests see what is asked of
/// it.
void run_ranks(
    int num_ranks, const std::function<void(World&)>& body,
    const CommOptions& options, const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace detail
}  // namespace echelon
