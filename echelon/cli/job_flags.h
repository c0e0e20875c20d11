// The flags of what is trained on what, as plan and simulate share them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace echelon::cli {

/// As written; empty: not given.
struct JobFlags {
  std::string model, cluster, batch, seq_len, precision, stack;
};

/// `flags` must outlive the command.
void add_job_flags(CLI::App& command, JobFlags& flags);

}  // namespace echelon::cli
