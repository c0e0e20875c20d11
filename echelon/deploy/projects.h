// Projects that share devices, as `echelon pool` has them in pool.toml, in the
// words of Kueue's and KAI's queues.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::deploy {

struct Project {
  std::string name;
  int64_t guaranteed = 0;  // devices
  double weight = 1;       // of its share of what others leave
  int64_t limit = -1;      // the most that it may have; -1: none
  std::string parent;      // the project that it is a part of; may be empty
};

/// The tables [project.NAME] of a TOML file. [pool] devices bounds what is
/// guaranteed, where it is given and above 0. Throws
/// ConfigError with file and line: a key that is not known, guaranteed devices
/// that add up to more than there are or than the parent has, a parent that
/// does not exist or has none of its own.
std::vector<Project> read_projects(const std::string& path);

}  // namespace echelon::deploy
