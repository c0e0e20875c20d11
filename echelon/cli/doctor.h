// The findings of `echelon doctor` about the host (doctor_host.cpp). Each
// function checks one thing and never throws.
#pragma once

#include <string>
#include <vector>

namespace echelon::cli {

struct Finding {
  enum class Level { ok, warning, error };
  std::string topic;  // "shared memory"
  Level level = Level::ok;
  std::string text;
  std::string remedy;  // empty when ok
};

Finding find_processor();
Finding find_memory();
Finding find_gpus();
/// Links between GPUs, to the host and to other machines.
Finding find_links();
/// This machine as find_cluster("local") describes it.
Finding find_local_cluster();
Finding find_shared_memory();
Finding find_memfd();
Finding find_pidfd();
Finding find_open_files();
Finding find_processes();
Finding find_locked_memory();
Finding find_ports();
Finding find_hostname();

}  // namespace echelon::cli
