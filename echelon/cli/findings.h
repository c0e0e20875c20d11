// What `echelon doctor` looks at. Each check looks at one thing and never
// throws.
#pragma once

#include <string>
#include <vector>

namespace echelon::cli {

struct Finding {
  enum class Level { ok, warning, error };
  std::string topic;  // "shared memory"
  Level level = Level::ok;
  std::string text;    // what was found
  std::string remedy;  // what to do; empty when ok
};

// machine.cpp: the host
Finding find_processor();
Finding find_memory();
Finding find_gpus();
/// Between GPUs, to the host and to other machines.
Finding find_links();
/// What find_cluster("local") makes of this machine.
Finding find_local_cluster();
Finding find_shared_memory();
Finding find_memfd();
Finding find_pidfd();
Finding find_open_files();
Finding find_processes();
Finding find_locked_memory();
Finding find_ports();
Finding find_hostname();

// programs.cpp: what was built
Finding find_compiler();
Finding find_libtorch();
/// Two ranks sum 1 MiB; at most a minute.
Finding find_all_reduce();

/// "1.5 GiB"
std::string bytes_text(double bytes);

}  // namespace echelon::cli
