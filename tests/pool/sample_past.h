// A past of a pool as its scheduler would have made it, for pages.
#pragma once

#include <sqlite3.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "echelon/pool/decide.h"
#include "echelon/pool/store.h"
#include "tests/pool/pool_cases.h"

namespace echelon::pool {

/// Jobs of all projects come at random, more of them by day, from `since` to
/// `until`. Every job has ended at the end.
inline std::vector<Allocation>
simulate_past(State state, double since, double until, int seed) {
  constexpr double kStep = 300;
  constexpr double kDay = 86400;
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto chance = [&] {
    return std::uniform_real_distribution<double>(0, 1)(random);
  };
  std::vector<int> leaves;
  for (size_t p = 0; p < state.projects.size(); ++p) {
    const bool parent =
        std::ranges::any_of(state.projects, [&](const Project& other) {
          return other.parent == static_cast<int>(p);
        });
    if (!parent) leaves.push_back(static_cast<int>(p));
  }
  std::vector<Allocation> past;
  std::map<int64_t, size_t> open;  // allocations of jobs
  int64_t jobs = 0;
  std::map<int64_t, double> work;  // device-seconds that are left
  for (state.now = since; state.now < until; state.now += kStep) {
    const double hour = std::fmod(state.now, kDay) / 3600;
    const double busy = hour > 8 && hour < 20 ? 0.09 : 0.015;
    for (const int leaf : leaves) {
      const Project& project = state.projects[static_cast<size_t>(leaf)];
      if (chance() > busy) continue;
      const auto devices = static_cast<int64_t>(state.devices.size());
      const int64_t limit = std::min(project.limit, devices);
      const int64_t least = std::min<int64_t>(limit, chance() < 0.5 ? 1 : 2);
      const bool keeps = least <= project.guaranteed && chance() < 0.5;
      submit(
          state, leaf, least, keeps ? least : std::min(limit, 3 * least),
          keeps ? Kept::all : Kept::none);
      state.jobs.back().id = ++jobs;
      work[jobs] = static_cast<double>(least) * 3600 * std::exp(2.2 * chance());
    }
    settle(state);
    for (const Job& job : state.jobs) {
      std::vector<std::string> names;
      for (const int device : job.devices) {
        names.push_back(std::to_string(device));
      }
      const auto known = open.find(job.id);
      if (known != open.end() && past[known->second].names != names) {
        past[known->second].ended = state.now;
        open.erase(known);
      }
      if (names.empty() || open.contains(job.id)) continue;
      open[job.id] = past.size();
      past.push_back(
          {.job = job.id,
           .project = state.projects[static_cast<size_t>(job.project)].name,
           .devices = static_cast<int64_t>(names.size()),
           .names = names,
           .began = state.now});
    }
    std::erase_if(state.jobs, [&](const Job& job) {
      double& left = work[job.id];
      left -= kStep * static_cast<double>(job.devices.size());
      if (left > 0) return false;
      if (const auto known = open.find(job.id); known != open.end()) {
        past[known->second].ended = state.now + kStep;
        open.erase(known);
      }
      return true;
    });
  }
  for (const auto& [job, at] : open) past[at].ended = until;
  return past;
}

/// Adds the allocations to the file of a pool whose daemon does not run, which
/// began then.
inline void write_past(
    const std::string& folder, const std::vector<Allocation>& past,
    double began) {
  sqlite3* file = nullptr;
  ASSERT_EQ(sqlite3_open((folder + "/pool.db").c_str(), &file), SQLITE_OK);
  std::string sql = "BEGIN; UPDATE value SET text = '" + std::to_string(began) +
                    "' WHERE name = 'began';";
  for (const Allocation& one : past) {
    std::string names;
    for (const auto& name : one.names)
      names += (names.empty() ? "" : " ") + name;
    sql +=
        "INSERT INTO allocation(job, project, devices, began, ended, names) "
        "VALUES(" +
        std::to_string(one.job) + ",'" + one.project + "'," +
        std::to_string(one.devices) + "," + std::to_string(one.began) + "," +
        std::to_string(one.ended) + ",'" + names + "');";
  }
  EXPECT_EQ(
      sqlite3_exec(file, (sql + "COMMIT").c_str(), nullptr, nullptr, nullptr),
      SQLITE_OK)
      << sqlite3_errmsg(file);
  sqlite3_close(file);
}

}  // namespace echelon::pool
