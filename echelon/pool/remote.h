// A pool over TCP: its page and its metrics for browsers and Prometheus, and
// its commands for `echelon pool --at`. Each is a process of its own, which
// asks the daemon through its socket, so that nobody who connects disturbs the
// daemon.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon::pool {

struct RemoteOptions {
  std::string page;        // an address of the page; empty: none
  std::string commands;    // an address of the commands; empty: none
  std::string token_file;  // of authentication::read_token()
};

struct RemoteAccess {
  std::string page_url;  // with its token; empty: no page
  bool page_is_local = true;
  std::string commands;  // the address; empty: no commands
  std::string token;     // where the token is: "the file /home/ann/…"
};

/// Starts what `options` ask for, for the daemon of `folder`, which this
/// process is about to be. It may have no other thread now, and the processes
/// end with it. Throws ConfigError when there is no token, or an address cannot
/// be used.
///
/// The page's own token is made from the user's, which it does not reveal, and
/// is written to `folder`/page-token, for Prometheus.
RemoteAccess serve_remotely(
    const std::filesystem::path& folder, const RemoteOptions& options);

/// One request to the pool whose commands are at `address`, and its answer, as
/// ask_pool(). The connection is encrypted. Throws ConfigError when there is
/// no pool, or it has another token.
nlohmann::ordered_json ask_remote_pool(
    const std::string& address, const std::string& token_file,
    nlohmann::ordered_json request);

}  // namespace echelon::pool
