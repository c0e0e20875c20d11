// The key-value store through which the ranks of a job find each other.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/trace/status_board.h"
#include "echelon/environment/rank_environment.h"

namespace echelon {

/// Connects to the job's store; rank 0 serves it, unless its launcher does. The
/// server listens on loopback alone when all ranks are on this host. Where the
/// launcher gave the ranks a key, the store is theirs alone (private_store.h).
/// Keys are prefixed with the job and its generation. Its calls end, with a
/// CommError, although the server hangs (bounded_store). Throws ConfigError
/// when the port is in use, CommError when the master cannot be reached in
/// time.
c10::intrusive_ptr<c10d::Store>
connect_store(const RankEnvironment& env, std::chrono::milliseconds timeout);

/// A second connection to the same store, for the status board.
c10::intrusive_ptr<c10d::Store> connect_store_again(
    const RankEnvironment& env, std::chrono::milliseconds timeout);

/// Stores `value` under `topic` and returns every rank's value. Every rank
/// calls. Throws a CommError with the ranks that did not come within `timeout`.
/// `where` names the place in that error.
std::vector<std::string> exchange(
    c10d::Store& store, const std::string& topic, int rank, int size,
    const std::string& value, std::chrono::milliseconds timeout,
    const std::string& where);

/// The values of all ranks, by rank, on rank 0; nothing elsewhere. Every rank
/// calls. A rank sends its value when rank 0 asks for it, in pieces that the
/// store takes, so that the store holds one piece at a time. Throws a CommError
/// that names the rank which did not come within `timeout`.
std::vector<std::string> gather(
    c10d::Store& store, const std::string& topic, int rank, int size,
    const std::string& value, std::chrono::milliseconds timeout);

/// The status board of ranks that share nothing but the store. Sends this
/// rank's status to the store twice a second when it has changed; reads are
/// round trips. Nothing else may use `store`.
std::unique_ptr<StatusBoard>
make_store_board(c10::intrusive_ptr<c10d::Store> store);

/// The address of this host that the master can reach: 127.0.0.1 on one host.
std::string reachable_address(const RankEnvironment& env);

}  // namespace echelon
