// Serves a job's figures to Prometheus, from a process of its own: whoever asks
// for the page, a file system that hangs and a driver that does not answer
// cannot disturb the launcher.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "echelon/monitoring/job_board.h"

namespace echelon::monitoring {

struct ExporterOptions {
  /// "127.0.0.1:9464", "[::1]:9464", a name and a port, or a port of 127.0.0.1;
  /// empty: nothing is served.
  std::string address;
  std::string run;  // the label `run`
  /// Where `echelon train` writes; empty: a program of the user's.
  std::filesystem::path folder;
  bool saves = false;  // the run saves checkpoints
  /// A file that has the page's text while the job runs, for the textfile
  /// collector of Prometheus' node exporter; empty: none (status_writer.h).
  std::filesystem::path text_file;
  /// Called about once a minute in the process that writes what others read,
  /// which runs after the ranks; it throws nothing. Null: nothing is called.
  std::function<void()> each_minute;
};

class Exporter {
 public:
  /// Listens, and starts the process that shows what is written to `board`. It
  /// ends with this one, which may have no other thread now. Throws ConfigError
  /// when the address cannot be used.
  Exporter(const ExporterOptions& options, const JobBoard& board);
  ~Exporter();
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;

  pid_t pid() const { return pid_; }
  /// Where the page is: "http://127.0.0.1:9464/metrics".
  const std::string& url() const { return url_; }
  /// Whether only this host can read it.
  bool is_loopback() const { return is_loopback_; }

 private:
  std::string url_;
  bool is_loopback_ = false;
  pid_t pid_ = -1;
};

}  // namespace echelon::monitoring
