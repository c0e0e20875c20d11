// A function for each engine, which deployment() calls once the settings have
// been checked, and what they share.
#pragma once

#include <string>
#include <vector>

#include "echelon/deploy/deploy.h"

namespace echelon::deploy {

/// `echelon train FILE …` as words. With several hosts: `host` is the text that
/// becomes this host's number, `master` that of host 0's address.
std::vector<std::string> train_command(
    const Workload& workload, const std::string& file, const std::string& host,
    const std::string& master);

/// "2", or "2:4" where hosts come and go.
std::string hosts_text(const Workload& workload);

/// "2 hosts of 8 ranks, layout fsdp=16", for the first line.
std::string summary(const Workload& workload);

/// Comment lines of at most 80 columns, each of which begins with "# ".
std::string comment(const std::string& text);

/// 512 MiB -> "512Mi", 3.2 GiB -> "4Gi": rounded up; `unit` is "Gi" and "Mi",
/// or "G" and "M" for Slurm, which means powers of two by these.
std::string memory_text(int64_t bytes, bool slurm);

std::string slurm_script(const Workload& workload, const Settings& settings);
std::string manifest_text(
    Engine engine, const Workload& workload, const Settings& settings);
std::string ssh_script(const Workload& workload, const Settings& settings);
std::string ray_driver(const Workload& workload, const Settings& settings);

}  // namespace echelon::deploy
