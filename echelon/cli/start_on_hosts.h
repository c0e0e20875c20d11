// Starts the launchers of all hosts of a job: by srun or by ssh.
#pragma once

#include <string>
#include <vector>

#include "echelon/cli/job_hosts.h"
#include "echelon/cli/programs.h"

namespace echelon::cli {

/// Starts this process's own command line on every host, and returns the job's
/// exit code. With srun, this process becomes srun and does not return.
///
///   command    the subcommand, "train"
///   num_ranks  of each host, where the command line has no -n; empty: it needs
///              none
int start_on_hosts(
    const JobHosts& hosts, const HostArguments& arguments,
    const std::string& command, const std::string& num_ranks);

/// This process's words, with its program's whole path.
std::vector<std::string> own_command_line();

/// A command line without those flags and their values, up to the program of
/// `run`, and with other words in front of the rest of the subcommand's.
std::vector<std::string> command_with(
    const std::vector<std::string>& line, const std::string& command,
    const std::vector<std::string>& without,
    const std::vector<std::string>& with);

}  // namespace echelon::cli
