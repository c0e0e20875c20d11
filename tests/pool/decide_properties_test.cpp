// What holds in every pool, tried on pools at random.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "echelon/pool/decide.h"
#include "echelon/pool/fair_share.h"
#include "tests/pool/pool_cases.h"

namespace echelon::pool::decide_properties_test {

constexpr int kPools = 300;
constexpr int kEvents = 40;
constexpr int64_t kWatched = 20;  // jobs
constexpr int64_t kWaiting = 24;

class Chance {
 public:
  explicit Chance(int seed) : random_(static_cast<unsigned>(seed)) {}
  int64_t from(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool one_in(int n) { return from(1, n) == 1; }

 private:
  std::mt19937 random_;
};

// Projects of one or two levels whose guarantees fit.
State random_pool(Chance& chance) {
  const auto devices = static_cast<int>(chance.from(1, 32));
  State state = make_pool(devices, static_cast<int>(chance.from(1, 8)));
  int64_t left = devices;
  const auto add = [&](int parent, int64_t& budget, int64_t limit) {
    Project project;
    project.name = "p" + std::to_string(state.projects.size());
    project.parent = parent;
    project.guaranteed = chance.from(0, budget);
    budget -= project.guaranteed;
    project.weight = static_cast<double>(chance.from(0, 4));
    if (chance.one_in(3)) {
      project.limit = chance.from(
          std::max<int64_t>(project.guaranteed, 1),
          std::max<int64_t>(limit, 1));
    }
    state.projects.push_back(project);
  };
  const int64_t tops = chance.from(1, 3);
  for (int64_t i = 0; i < tops; ++i) {
    const int top = static_cast<int>(state.projects.size());
    add(-1, left, devices);
    if (!chance.one_in(2)) continue;
    int64_t budget = state.projects[static_cast<size_t>(top)].guaranteed;
    const int64_t limit = std::min<int64_t>(
        devices, state.projects[static_cast<size_t>(top)].limit);
    for (int64_t c = chance.from(1, 3); c > 0; --c) add(top, budget, limit);
  }
  return state;
}

bool is_parent(const State& state, size_t project) {
  return std::ranges::any_of(state.projects, [&](const Project& other) {
    return other.parent == static_cast<int>(project);
  });
}

int64_t limit_of(const State& state, const Project& project) {
  const auto devices = static_cast<int64_t>(state.devices.size());
  const int64_t own = std::min(project.limit, devices);
  return project.parent < 0
             ? own
             : std::min(
                   own,
                   state.projects[static_cast<size_t>(project.parent)].limit);
}

// What each project may have while all ask for all that there is.
std::vector<int64_t> rooms_of(const State& state) {
  std::vector<int64_t> requested;
  for (size_t p = 0; p < state.projects.size(); ++p) {
    requested.push_back(
        is_parent(state, p) ? 0 : limit_of(state, state.projects[p]));
  }
  return fair_shares(state, requested);
}

void submit_one(State& state, Chance& chance) {
  std::vector<int> leaves;
  for (size_t p = 0; p < state.projects.size(); ++p) {
    if (!is_parent(state, p)) leaves.push_back(static_cast<int>(p));
  }
  const int project = leaves[static_cast<size_t>(
      chance.from(0, static_cast<int64_t>(leaves.size()) - 1))];
  const Project& of = state.projects[static_cast<size_t>(project)];
  auto kept = static_cast<Kept>(chance.from(0, 2));
  if (of.guaranteed == 0) kept = Kept::none;
  const int64_t limit = limit_of(state, of);
  const int64_t least = chance.from(
      1, kept == Kept::none ? limit : std::min(limit, of.guaranteed));
  const int64_t most = chance.from(least, limit);
  submit(state, project, least, most, kept, chance.from(0, 2));
  if (chance.one_in(4) && most > least + 1) {
    state.jobs.back().refused = {chance.from(least + 1, most)};
  }
}

struct Held {
  std::vector<int64_t> devices, secured;
};

Held held_by_projects(const State& state) {
  Held held{
      std::vector<int64_t>(state.projects.size()),
      std::vector<int64_t>(state.projects.size())};
  for (const Job& job : state.jobs) {
    const auto count = static_cast<int64_t>(job.devices.size());
    const auto p = static_cast<size_t>(job.project);
    held.devices[p] += count;
    if (job.kept == Kept::all) held.secured[p] += count;
    if (job.kept == Kept::least) held.secured[p] += std::min(count, job.least);
    if (state.projects[p].parent >= 0) {
      held.devices[static_cast<size_t>(state.projects[p].parent)] += count;
    }
  }
  return held;
}

void expect_sound(const State& state) {
  std::set<int> used;
  for (const Job& job : state.jobs) {
    for (const int device : job.devices) {
      EXPECT_TRUE(used.insert(device).second)
          << "device " << device << " twice";
      EXPECT_TRUE(state.devices.at(static_cast<size_t>(device)).usable);
    }
    const auto count = static_cast<int64_t>(job.devices.size());
    if (count == 0) continue;
    EXPECT_GE(count, job.least);
    EXPECT_LE(count, job.most);
    EXPECT_EQ(std::ranges::count(job.refused, count), 0);
  }
  const Held held = held_by_projects(state);
  for (size_t p = 0; p < state.projects.size(); ++p) {
    EXPECT_LE(held.devices[p], state.projects[p].limit);
    EXPECT_LE(held.secured[p], state.projects[p].guaranteed);
  }
}

// Nobody waits who asks for no more than what is guaranteed, unless an earlier
// job of the same project waits for that too.
void expect_guarantees(const State& state, const Decision& decision) {
  const Held held = held_by_projects(state);
  for (const Waiting& waiting : decision.waiting) {
    if (waiting.reason == Waiting::Reason::behind) continue;
    const Job& job = state.jobs[waiting.job];
    const auto p = static_cast<size_t>(job.project);
    const int64_t guaranteed = state.projects[p].guaranteed;
    if (job.kept != Kept::none && held.secured[p] + job.least > guaranteed) {
      continue;
    }
    EXPECT_GT(held.devices[p] + job.least, guaranteed)
        << "job " << job.id << " of " << state.projects[p].name;
  }
}

// Nothing idles that somebody could use.
void expect_work(const State& state, const Decision& decision) {
  size_t idle = state.devices.size();
  for (const Job& job : state.jobs) idle -= job.devices.size();
  for (const Waiting& waiting : decision.waiting) {
    if (waiting.reason != Waiting::Reason::devices) continue;
    EXPECT_GT(state.jobs[waiting.job].least, static_cast<int64_t>(idle));
  }
}

std::vector<std::vector<int>> places(const State& state) {
  std::vector<std::vector<int>> all;
  for (const Job& job : state.jobs) all.push_back(job.devices);
  return all;
}

// Arrivals, ends and time, in any order; after each the pool is sound, all
// guarantees are reached, and a second decision changes nothing.
TEST(DecideProperties, HoldAfterEachChange) {
  for (int seed = 0; seed < kPools; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Chance chance(seed);
    State state = random_pool(chance);
    if (chance.one_in(4)) state.rules.usage_factor = 0.5;
    const bool impatient = chance.one_in(2);
    if (!impatient) state.rules.patience_seconds = 1e9;
    for (int event = 0; event < kEvents; ++event) {
      SCOPED_TRACE("event " + std::to_string(event));
      state.now += static_cast<double>(chance.from(1, 400));
      if (state.jobs.empty() || !chance.one_in(3)) {
        submit_one(state, chance);
      } else {
        state.jobs.erase(
            state.jobs.begin() +
            chance.from(0, static_cast<int64_t>(state.jobs.size()) - 1));
      }
      for (auto& project : state.projects) {
        project.usage = static_cast<double>(chance.from(0, 1000));
      }
      const Decision decision = settle(state);
      expect_sound(state);
      expect_guarantees(state, decision);
      expect_work(state, decision);
      const auto before = places(state);
      EXPECT_TRUE(decide(state).orders.empty());
      // Time that passes is no reason to change anything.
      State later = state;
      later.now += 1000;
      settle(later);
      if (!impatient) {
        EXPECT_EQ(places(later), before);
      }
      ASSERT_FALSE(testing::Test::HasFailure());
    }
  }
}

// With a minimum running time a guarantee may wait for it, but not longer.
TEST(DecideProperties, GuaranteesWaitForTheLeastTimeAtMost) {
  for (int seed = 0; seed < kPools; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Chance chance(seed);
    State state = random_pool(chance);
    state.rules.least_seconds = 100;
    for (int event = 0; event < kEvents; ++event) {
      submit_one(state, chance);
      const auto before = counts_of(state);
      settle(state);
      expect_sound(state);
      for (size_t j = 0; j < before.size(); ++j) {
        if (before[j] > 0 && count_of(state, j) == 0) {
          EXPECT_GE(state.now - state.jobs[j].started, 100);
        }
      }
      if (event % 8 == 7) {
        state.now += 100;
        settle(state);
        expect_guarantees(state, decide(state));
      }
      if (testing::Test::HasFailure()) return;
      state.now += 1;
    }
  }
}

// Devices that fail and come back.
TEST(DecideProperties, NobodyKeepsAnUnusableDevice) {
  for (int seed = 0; seed < kPools; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Chance chance(seed);
    State state = random_pool(chance);
    for (int event = 0; event < kEvents; ++event) {
      submit_one(state, chance);
      auto& device = state.devices[static_cast<size_t>(
          chance.from(0, static_cast<int64_t>(state.devices.size()) - 1))];
      device.usable = !device.usable;
      settle(state);
      expect_sound(state);
      settle(state);
      expect_sound(state);
      EXPECT_TRUE(decide(state).orders.empty());
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Small jobs always wait, and could take whatever becomes idle. Each of the
// first jobs ends all the same, if it asks for no more than its project's
// share.
TEST(DecideProperties, NobodyStarves) {
  for (int seed = 0; seed < kPools; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Chance chance(seed);
    State state = random_pool(chance);
    state.rules.patience_seconds = 50;
    const auto rooms = rooms_of(state);
    const auto room_of = [&](const Job& job) {
      return rooms[static_cast<size_t>(job.project)];
    };
    std::map<int64_t, int64_t> work;  // device-seconds left, by job
    int64_t next_id = 1;
    const auto submit_some = [&] {
      submit_one(state, chance);
      Job& job = state.jobs.back();
      job.id = next_id++;
      job.priority = 0;
      const int64_t room = room_of(job);
      if (job.id > kWatched || room < 1) {
        job.least = job.most = 1;
        job.kept = Kept::none;
        job.refused.clear();
      }
      job.least = std::min(job.least, std::max<int64_t>(room, 1));
      work[job.id] = chance.from(1, 60) * job.least;
    };
    const auto one_waits = [&] {
      return next_id == 1 ||
             std::ranges::any_of(state.jobs, [&](const Job& job) {
               return job.id <= kWatched && room_of(job) > 0;
             });
    };
    for (int second = 0; second < 20000 && one_waits(); ++second) {
      state.now += 1;
      int64_t waiting = std::ranges::count_if(
          state.jobs, [](const Job& job) { return job.devices.empty(); });
      for (; waiting < kWaiting; ++waiting) submit_some();
      settle(state);
      for (const Job& job : state.jobs) {
        work[job.id] -= static_cast<int64_t>(job.devices.size());
      }
      std::erase_if(
          state.jobs, [&](const Job& job) { return work[job.id] <= 0; });
    }
    ASSERT_FALSE(one_waits())
        << "job " << state.jobs.front().id
        << " has waited for ever: " << why(state, decide(state), 0);
  }
}

}  // namespace echelon::pool::decide_properties_test
