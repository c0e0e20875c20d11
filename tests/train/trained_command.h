// The words of `echelon train` as its tests give them.
#pragma once

#include <algorithm>
#include <cstdint>
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

/// The processes of a job that train.
inline std::vector<pid_t> ranks_of(const testing_support::Command& job) {
  std::vector<pid_t> ranks;
  for (const pid_t pid : job.living()) {
    const std::string command =
        testing_support::read_file("/proc/" + std::to_string(pid) + "/cmdline");
    if (command.starts_with(program("echelon-train"))) ranks.push_back(pid);
  }
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace echelon
