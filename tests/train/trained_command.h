// The words of `echelon train` as its tests give them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon {

using Words = std::vector<std::string>;

inline const std::string kEchelon = program("echelon");
inline const std::string kDigits = source_path("examples/configs/digits.toml");

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// "--set" before each of "train.batch=8" and the like.
inline Words set(const Words& assignments) {
  Words words;
  for (const auto& one : assignments) words = words + Words{"--set", one};
  return words;
}

/// Trains the digits for so many steps into the folder `run`.
inline Words train_digits(const std::string& run, int64_t steps) {
  return Words{kEchelon, "train", kDigits} +
         set(
             {"train.run=" + run, "train.epochs=0",
              "train.steps=" + std::to_string(steps),
              "optimizer.warmup_steps=0"});
}

/// The processes of a job that train, by rank.
inline std::vector<pid_t> ranks_of(const testing_support::Command& job) {
  using testing_support::read_file;
  std::map<int, pid_t> ranks;
  for (const pid_t pid : job.living()) {
    const std::string process = "/proc/" + std::to_string(pid);
    if (!read_file(process + "/cmdline")
             .starts_with(program("echelon-train"))) {
      continue;
    }
    const std::string environment = read_file(process + "/environ");
    const std::string name = std::string(1, '\0') + "RANK=";
    const size_t at = ('\0' + environment).find(name);
    if (at != std::string::npos) {
      ranks[std::stoi(environment.substr(at + name.size() - 1))] = pid;
    }
  }
  std::vector<pid_t> pids;
  for (const auto& [rank, pid] : ranks) pids.push_back(pid);
  return pids;
}

}  // namespace echelon
