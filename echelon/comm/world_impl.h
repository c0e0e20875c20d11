// What a World holds; for the files of comm/ alone, since it names c10d's types.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/environment.h"
#include "echelon/comm/observer.h"
#include "echelon/comm/world.h"

namespace echelon {

namespace local { class Host; }

struct World::Impl {
  RankEnvironment env;
  CommOptions options;
  BackendKind kind = BackendKind::local;
  torch::Device device = torch::kCPU;
  std::string address = "127.0.0.1";           // this host, as peers see it
  c10::intrusive_ptr<c10d::Store> store;       // null for one rank
  std::shared_ptr<local::Host> host;           // ranks of one host
  std::shared_ptr<Observer> observer;
  size_t num_groups = 0;
  size_t num_exchanges = 0;
  bool threads = false;                        // a rank of run_ranks
  std::optional<Group> group;

  /// A group of `ranks`; members call. `number` counts groups of the world.
  Group make(const std::string& axis, const std::vector<int>& ranks);
};

/// Which backend `options` and the machine lead to.
BackendKind choose_backend(
    const CommOptions& options, const RankEnvironment& env);

}  // namespace echelon
