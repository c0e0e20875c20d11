// What a World holds; for the files of comm/ alone, since it names c10d's
// types.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/observer.h"
#include "echelon/comm/world.h"
#include "echelon/environment/rank_environment.h"

namespace echelon {

namespace local {
class Host;
class Hub;
}  // namespace local

struct World::Impl {
  RankEnvironment env;
  CommOptions options;
  BackendKind kind = BackendKind::local;
  torch::Device device = torch::kCPU;
  std::string address = "127.0.0.1";      // this host, as peers see it
  c10::intrusive_ptr<c10d::Store> store;  // null for one rank
  std::shared_ptr<local::Host> host;      // ranks of one host
  std::shared_ptr<local::Hub> hub;        // ranks that are threads
  std::shared_ptr<Observer> observer;
  size_t num_groups = 0;
  size_t num_exchanges = 0;
  std::optional<Group> group;

  /// The device is the GPU of this rank's place on its host.
  void use_gpu();
  /// Meets the ranks of this host; all of them call.
  void join_host();
  /// A group of `ranks`; every rank of the world calls.
  Group make(
      const std::string& axis, const std::vector<int>& ranks,
      BackendKind backend);
};

/// Which backend `options` and the machine lead to.
BackendKind
choose_backend(const CommOptions& options, const RankEnvironment& env);

}  // namespace echelon
