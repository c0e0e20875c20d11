// A run's state as a page, and who may see it.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "echelon/monitoring/page_server.h"
#include "echelon/watch/run_watch.h"

namespace echelon::watch {

/// The page: figures, curves, ranks and findings. It shows everything with
/// scripts off, and then asks for itself again every five seconds; with a
/// script it moves each second. It asks nobody else for anything.
std::string to_page(const RunView& view);

/// Whether a request for a page on this host alone may be answered: its Host
/// is a name of this host's own, so that no other name leads here (DNS
/// rebinding); its Origin, if it has one, is the page itself; and its query has
/// the token. Nothing: it may.
std::optional<monitoring::PageRefusal>
refusal_of(const monitoring::PageRequest& request, std::string_view token);

/// Serves the page of a run on this host alone.
class WebWatch {
 public:
  /// `address`: a port of 127.0.0.1, or "127.0.0.1:9465". Throws ConfigError
  /// when it cannot be used, or leads beyond this host.
  WebWatch(const std::filesystem::path& run, const std::string& address);
  ~WebWatch();
  WebWatch(const WebWatch&) = delete;
  WebWatch& operator=(const WebWatch&) = delete;

  /// With the token, which is new each time.
  const std::string& url() const { return url_; }
  /// Waits at most so long for what comes, and answers it.
  void serve(std::chrono::milliseconds at_most);

 private:
  std::string url_;
  RunWatch watch_;
  std::unique_ptr<monitoring::PageServer> server_;
};

}  // namespace echelon::watch
