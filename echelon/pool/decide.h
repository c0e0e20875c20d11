// Which job of a pool has which devices: one pure function.
//
// The rules are KAI's. Each project's fair share is its guarantee, as far as it
// asks for it, and what is left is divided by weight among those who still ask,
// up to their limits; projects of one parent divide that parent's share. A
// project gets devices that are idle beyond its fair share too, but only as a
// loan: pre-emptible devices above a fair share are taken back by projects that
// are below theirs, from the most saturated one (held over fair share) first.
//
// A job gets its least number of devices at once, or none. A victim shrinks as
// far as it can before any is stopped. Priorities count inside a project alone.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace echelon::pool {

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

struct Project {
  std::string name;
  int parent = -1;  // an index of State::projects; -1: none
  int64_t guaranteed =
      0;              // devices; of a parent at least those of its children
  double weight = 1;  // its part of what is left, at least 0
  int64_t limit = kNoLimit;
  double usage = 0;  // device-seconds beyond the guarantee, decayed by age
};

struct Device {
  int group = 0;       // devices of one group are NVLink neighbours
  bool usable = true;  // false: jobs leave it
};

/// Which of a job's devices may be taken from it.
enum class Kept {
  all,    // none: they are within the project's guarantee
  least,  // those above its least number, which is within the guarantee
  none,   // all: it can be stopped, and waits for another start
};

struct Job {
  int64_t id = 0;
  int project = 0;              // one that is nobody's parent
  int64_t least = 1, most = 1;  // devices
  Kept kept = Kept::all;
  int64_t priority = 0;  // the higher goes first, in its project
  double submitted = 0;  // seconds, as State::now
  double waiting_since = 0;
  double started = 0;
  std::vector<int> devices;      // indices of State::devices; empty: it waits
  std::vector<int64_t> refused;  // numbers of devices that it cannot have
};

struct Rules {
  double least_seconds = 0;  // a job that runs for less is not stopped
  /// Nobody of its project overtakes a job that has waited for longer than
  /// this, if it asks for no more than the project's fair share.
  double patience_seconds = 600;
  double usage_factor = 0;  // how much usage lowers a weight; 0: not at all
};

struct State {
  double now = 0;
  Rules rules;
  bool starts = true;  // false: no job starts or grows
  std::vector<Project> projects;
  std::vector<Device> devices;
  std::vector<Job> jobs;
};

struct Order {
  enum class Kind { stop, shrink, start, grow };
  Kind kind = Kind::start;
  size_t job = 0;            // an index of State::jobs
  std::vector<int> devices;  // all that it has afterwards
};

/// Why a job waits, with the numbers that decided it.
struct Waiting {
  enum class Reason {
    devices,       // too few are idle, and the project may not take more back
    young,         // the jobs that must make room have run for too short a time
    guarantee,     // its project's guarantee is used up
    limit,         // of its project
    parent_limit,  // of its project's parent
    behind,        // a job is before it, which it may not overtake
    closed,        // no job starts now
  };
  size_t job = 0;
  Reason reason = Reason::devices;
  int64_t idle = 0, held = 0, fair = 0;  // held, fair: of its project
  int64_t secured = 0;  // devices of its project that nobody may take
  int64_t parent_held = 0;
  int64_t before = 0;      // jobs of its project that are before it
  int64_t other_job = -1;  // behind: an index of State::jobs
};

struct Decision {
  std::vector<Order> orders;        // stops and shrinks first
  std::vector<int64_t> fair_share;  // of each project
  std::vector<int64_t> held;        // by each project, afterwards
  std::vector<Waiting> waiting;     // all jobs that wait afterwards
};

/// What should change now. Deciding again, on the state that the orders lead
/// to, gives no orders.
Decision decide(const State& state);

/// One line on why a job of `decision.waiting` waits.
std::string text_of(const State& state, const Waiting& waiting);

/// The state after all orders are carried out.
State after(State state, const Decision& decision);

}  // namespace echelon::pool
