// Writes what a launcher knows of its job into the run's folder (run_status.h),
// and the page of its metrics into a file for Prometheus' node exporter, from a
// process of its own: a file system that hangs or is full cannot disturb the
// launcher.
#pragma once

#include <sys/types.h>

#include "echelon/monitoring/exporter.h"
#include "echelon/monitoring/job_board.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::monitoring {

class StatusWriter {
 public:
  /// Starts the process, unless the options have neither a folder nor a
  /// text_file. This one may have no other thread now. Throws ConfigError when
  /// text_file cannot be written.
  StatusWriter(const ExporterOptions& options, const JobBoard& board);
  /// Lets it write how the job ended, as the board says, and remove text_file:
  /// for two seconds at most.
  ~StatusWriter();
  StatusWriter(const StatusWriter&) = delete;
  StatusWriter& operator=(const StatusWriter&) = delete;

  /// -1: there is none.
  pid_t pid() const { return pid_; }

 private:
  FileDescriptor to_;  // a byte ends the process
  pid_t pid_ = -1;
};

}  // namespace echelon::monitoring
