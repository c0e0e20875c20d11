// The file of a pool: its projects, and how devices change hands.
//
//   [pool]
//   min_runtime = "1m"
//
//   [project.vision]
//   guaranteed = 3
//   limit = 8
//   users = ["anna", "ben"]
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/pool/decide.h"

namespace echelon::pool {

/// Who may submit to a project; both empty: everyone who reaches the pool.
struct Members {
  std::vector<std::string> users, groups;
};

struct Settings {
  int64_t devices = 0;     // plain slots; 0: what the machine has
  int64_t neighbours = 0;  // devices of a group, in their order; 0: all
  Rules rules;
  std::chrono::milliseconds usage_half_life{0};  // 0: usage does not count
  std::chrono::milliseconds grace{30'000};       // from SIGTERM to SIGKILL
  std::string group;  // of Unix, which may talk to the pool; empty: its owner
  std::vector<Project> projects;
  std::vector<Members> members;  // of each project
};

/// Throws ConfigError with file, line and column: for unknown tables and keys
/// with the nearest ones, values out of range, a parent that is unknown or has
/// one itself, a limit below a guarantee, and children that are guaranteed more
/// than their parent.
Settings read_settings(const std::string& path);
Settings parse_settings(const std::string& text, const std::string& name);

/// Throws ConfigError when more is guaranteed than there are devices.
void check_capacity(
    const Settings& settings, const std::string& name, int64_t devices);

/// The index of the project that takes jobs under this name. Throws ConfigError
/// with the nearest name when there is none, and for a parent.
int find_project(const std::vector<Project>& projects, const std::string& name);

}  // namespace echelon::pool
