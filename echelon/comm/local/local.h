// The `local` backend: ranks of one host, as threads or as processes, through
// their shared memory. No network, no GPU; tensors of other devices pass
// through host memory.
//
//   threads:    auto hub = make_hub(4);                        // once
//               auto host = join_threads(hub, rank);           // each
//   processes:  auto host = join_processes(store, "job-7/0", rank, 4, {});
//   then        auto backend =
//                   make_backend(host, {0, 1, 2, 3}, "world", timeout);
//
// The errors are in failure.h; a wrong argument on one rank alone throws
// ConfigError before anything is sent.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/comm/shared_memory/host.h"

namespace echelon::local {

/// The same as in host.h, with a store that every rank of the host reaches.
/// Every rank calls.
std::shared_ptr<Host> join_processes(
    c10::intrusive_ptr<c10d::Store> store, const std::string& job_key, int rank,
    int size, const JoinOptions& options);

/// The communicator of `ranks` (of the host, by group rank). All members call,
/// each rank in the same order for all groups that share a name. Disjoint
/// groups may be made at the same time; nobody waits here.
///
/// dtypes: float32 float64 bfloat16 float16 int8 uint8 int16 int32 int64 bool.
/// Reductions: sum avg min max (reduce.h says how each is computed). It has the
/// calls that Group makes, and relies on Group's checks of their arguments.
c10::intrusive_ptr<c10d::Backend> make_backend(
    std::shared_ptr<Host> host, const std::vector<int>& ranks,
    const std::string& group_name, std::chrono::milliseconds timeout);

}  // namespace echelon::local
