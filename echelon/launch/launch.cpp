#include "echelon/launch/launch.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "echelon/launch/checks.h"
#include "echelon/launch/hosts.h"
#include "echelon/launch/job.h"
#include "echelon/launch/job_start.h"

namespace echelon::launch {
namespace {

// If 0, 1 or 2 were closed, the launcher's own pipes would get these numbers.
void open_standard_files() {
  int fd = -1;
  do {
    fd = open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd > 2) close(fd);
}

}  // namespace

int run(const LaunchOptions& options) {
  check(options);
  open_standard_files();
  find_program(options.command[0]);
  if (options.num_nodes == 1) {
    return Job(options, start_alone(options), Hosts()).run();
  }
  JobStart start;
  Hosts hosts = Hosts::meet(options, start);
  return Job(options, std::move(start), std::move(hosts)).run();
}

}  // namespace echelon::launch
