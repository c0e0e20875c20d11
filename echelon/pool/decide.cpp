// Works on numbers of devices alone; which devices these are is decided last
// (placement.h). Rounds of starts and of growth repeat until nothing changes,
// and only the difference between the first and the last numbers becomes
// orders. So what a round takes and a later one gives back disturbs no job.
//
// Why it comes to rest: fair shares depend on what jobs ask for, not on what
// they have. A project takes from others only while it stays within its fair
// share, and only from those above theirs. Inside a project a job stops only
// jobs of lower rank. Growth uses what no waiting job can start on.
//
// Why guarantees hold: what is above fair shares and what is idle are together
// at least what a project below its share lacks, and nothing above a fair share
// is secured.
#include "echelon/pool/decide.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "echelon/pool/fair_share.h"
#include "echelon/pool/placement.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::pool {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);
constexpr int kMostRounds = 16;

using Reason = Waiting::Reason;

// What a job is worth inside its project: those within the guarantee first.
using Rank = std::pair<bool, int64_t>;

class Decider {
 public:
  explicit Decider(const State& state)
      : state_(state),
        counts_(state.jobs.size()),
        least_(state.jobs.size()),
        moved_(state.jobs.size()),
        full_(state.jobs.size()),
        teams_(state.projects.size()),
        why_(state.jobs.size()) {
    idle_ = std::ranges::count_if(state.devices, &Device::usable);
    for (size_t j = 0; j < state.jobs.size(); ++j) {
      least_[j] = smallest(state.jobs[j]);
      if (!state.jobs[j].devices.empty()) {
        teams_[project(j)].running.push_back(j);
        set(j, static_cast<int64_t>(state.jobs[j].devices.size()));
      }
    }
  }

  Decision run() {
    leave_unusable();
    share();
    respect_limits();
    line_up();
    for (int round = 0; round < kMostRounds; ++round) {
      bool changed = start_all();
      changed |= grow_all();
      if (!changed) break;
      line_up();
    }
    return result();
  }

 private:
  // A job that did not start, for jobs that cannot do better.
  struct Failure {
    int64_t version = -1;
    int64_t least = 0;
    Reason reason = Reason::devices;
  };
  struct Team {
    int64_t held = 0;  // of a parent: by its children
    int64_t secured = 0;
    int64_t fair = 0;
    std::vector<size_t> running;     // and some that were stopped
    std::vector<size_t> waiting;     // in the order in which they are tried
    size_t next = 0;                 // in waiting
    size_t secured_blocked = kNone;  // a job that others may not overtake
    size_t blocked = kNone;          // the same, for all others
    std::array<Failure, 3> failures;
  };

  // --- Jobs

  const Job& job(size_t j) const { return state_.jobs[j]; }
  size_t project(size_t j) const { return static_cast<size_t>(job(j).project); }
  Rank rank(size_t j) const {
    return {job(j).kept != Kept::none, job(j).priority};
  }
  static bool allows(const Job& job, int64_t count) {
    return count >= job.least && count <= job.most &&
           std::ranges::find(job.refused, count) == job.refused.end();
  }
  static int64_t smallest(const Job& job) {
    for (int64_t n = job.least; n <= job.most; ++n) {
      if (allows(job, n)) return n;
    }
    return kNoLimit;  // it never starts
  }
  // The largest number up to `count` that the job can have; 0: none.
  int64_t at_most(size_t j, int64_t count) const {
    for (int64_t n = std::min(count, job(j).most); n >= least_[j]; --n) {
      if (allows(job(j), n)) return n;
    }
    return 0;
  }
  // The next larger number; 0: none.
  int64_t next_size(size_t j) const {
    for (int64_t n = counts_[j] + 1; n <= job(j).most; ++n) {
      if (allows(job(j), n)) return n;
    }
    return 0;
  }
  int64_t secured_of(size_t j, int64_t count) const {
    switch (job(j).kept) {
      case Kept::all:
        return count;
      case Kept::least:
        return std::min(count, least_[j]);
      case Kept::none:
        break;
    }
    return 0;
  }
  bool is_elastic(size_t j) const {
    return job(j).kept != Kept::all && counts_[j] > least_[j];
  }
  bool is_young(size_t j) const {
    return state_.now - job(j).started < state_.rules.least_seconds;
  }
  bool is_stoppable(size_t j) const {
    return job(j).kept == Kept::none && counts_[j] > 0;
  }

  // --- Changes, which can be undone

  void set(size_t j, int64_t count) {
    Team& team = teams_[project(j)];
    const int64_t more = count - counts_[j];
    team.held += more;
    team.secured += secured_of(j, count) - secured_of(j, counts_[j]);
    if (const int parent = state_.projects[project(j)].parent; parent >= 0) {
      teams_[static_cast<size_t>(parent)].held += more;
    }
    idle_ -= more;
    counts_[j] = count;
  }
  void change(size_t j, int64_t count) {
    log_.emplace_back(j, counts_[j]);
    set(j, count);
  }
  void undo(size_t mark) {
    while (log_.size() > mark) {
      set(log_.back().first, log_.back().second);
      log_.pop_back();
    }
  }

  // --- Projects

  int64_t fair(size_t p) const { return teams_[p].fair; }
  int64_t held(size_t p) const { return teams_[p].held; }
  double saturation(size_t p) const {
    if (held(p) == 0) return 0;
    return fair(p) == 0
               ? 1e9 + static_cast<double>(held(p))
               : static_cast<double>(held(p)) / static_cast<double>(fair(p));
  }
  int64_t parent_excess(size_t p, int64_t more) const {
    const int parent = state_.projects[p].parent;
    if (parent < 0) return 0;
    const auto at = static_cast<size_t>(parent);
    const int64_t limit = state_.projects[at].limit;
    return limit == kNoLimit ? 0 : held(at) + more - limit;
  }
  int64_t excess(size_t p, int64_t more) const {
    const int64_t limit = state_.projects[p].limit;
    return limit == kNoLimit ? 0 : held(p) + more - limit;
  }
  bool within_guarantee(size_t p, int64_t more) const {
    return held(p) + more <= state_.projects[p].guaranteed;
  }

  void share() {
    std::vector<int64_t> secured(teams_.size()), loans(teams_.size());
    for (size_t j = 0; j < counts_.size(); ++j) {
      const Job& one = job(j);
      if (least_[j] == kNoLimit) continue;
      const int64_t most = at_most(j, one.most);
      secured[project(j)] += secured_of(j, most);
      loans[project(j)] += most - secured_of(j, most);
    }
    std::vector<int64_t> requested(teams_.size());
    for (size_t p = 0; p < teams_.size(); ++p) {
      const Project& one = state_.projects[p];
      requested[p] = std::min(
          one.limit,
          std::max(std::min(secured[p], one.guaranteed), teams_[p].secured) +
              loans[p]);
    }
    const auto shares = fair_shares(state_, std::move(requested));
    for (size_t p = 0; p < teams_.size(); ++p) teams_[p].fair = shares[p];
  }

  // --- What must be, whatever anybody is entitled to

  void leave_unusable() {
    for (size_t j = 0; j < counts_.size(); ++j) {
      const auto& devices = job(j).devices;
      const auto lost = std::ranges::count_if(devices, [&](int device) {
        return !state_.devices[static_cast<size_t>(device)].usable;
      });
      if (lost > 0) {
        moved_[j] = moves_ = true;
        set(j, at_most(j, counts_[j] - lost));
      } else if (counts_[j] > job(j).most) {  // changed by its user
        set(j, at_most(j, job(j).most));
      }
    }
    idle_ = std::ranges::count_if(state_.devices, &Device::usable);
    for (const int64_t count : counts_) idle_ -= count;
  }

  // A limit may be lower than when the jobs started.
  void respect_limits() {
    constexpr Rank kHighest{true, kNoLimit};
    for (size_t p = 0; p < teams_.size(); ++p) {
      if (excess(p, 0) > 0) take_own(p, kHighest, excess(p, 0));
    }
    for (size_t p = 0; p < teams_.size(); ++p) {
      if (parent_excess(p, 0) > 0) take_own(p, kHighest, parent_excess(p, 0));
    }
  }

  // --- Taking devices back

  // The one that loses its devices first: low rank, short time.
  bool loses_first(size_t a, size_t b) const {
    return std::tuple(rank(a), -job(a).started, -job(a).id) <
           std::tuple(rank(b), -job(b).started, -job(b).id);
  }
  template <class May>
  size_t victim(size_t p, const May& may) const {
    size_t best = kNone;
    for (const size_t j : teams_[p].running) {
      if (may(j) && (best == kNone || loses_first(j, best))) best = j;
    }
    return best;
  }

  void shrink(size_t j, int64_t amount) {
    const int64_t count = std::max(at_most(j, counts_[j] - amount), least_[j]);
    change(j, count);
  }

  // Frees up to `amount` devices of the project's jobs up to this rank; those
  // of the same rank only shrink. Returns how many.
  int64_t take_own(size_t p, const Rank& rank_of, int64_t amount) {
    const int64_t before = idle_;
    while (idle_ - before < amount) {
      const size_t j = victim(
          p, [&](size_t v) { return is_elastic(v) && rank(v) <= rank_of; });
      if (j == kNone) break;
      shrink(j, amount - (idle_ - before));
    }
    while (idle_ - before < amount) {
      const size_t j = victim(p, [&](size_t v) {
        if (!is_stoppable(v) || rank(v) >= rank_of) return false;
        young_ |= is_young(v);
        return !is_young(v);
      });
      if (j == kNone) break;
      change(j, 0);
    }
    return idle_ - before;
  }

  // The most saturated project above its fair share, of this parent if there is
  // one, that has a job for `may`.
  template <class May>
  size_t most_saturated(size_t own, int parent, const May& may) const {
    size_t best = kNone;
    for (size_t p = 0; p < teams_.size(); ++p) {
      if (p == own || held(p) <= fair(p)) continue;
      if (parent >= 0 && state_.projects[p].parent != parent) continue;
      if (best != kNone && saturation(p) <= saturation(best)) continue;
      if (victim(p, may) != kNone) best = p;
    }
    return best;
  }

  // Frees up to `amount` devices of other projects, as long as these are above
  // their fair shares. Jobs are stopped only when shrinking is not enough.
  void take_excess(size_t own, int parent, int64_t amount, bool stops) {
    const int64_t target = idle_ + amount;
    const auto shrinks = [&](size_t v) { return is_elastic(v); };
    while (idle_ < target) {
      const size_t p = most_saturated(own, parent, shrinks);
      if (p == kNone) break;
      shrink(victim(p, shrinks), std::min(target - idle_, held(p) - fair(p)));
    }
    const auto ends = [&](size_t v) { return is_stoppable(v) && !is_young(v); };
    while (stops && idle_ < target) {
      const size_t p = most_saturated(own, parent, ends);
      if (p == kNone) {
        young_ |= most_saturated(own, parent, [&](size_t v) {
                    return is_stoppable(v);
                  }) != kNone;
        break;
      }
      change(victim(p, ends), 0);
    }
  }

  // An upper bound of what take_excess can free.
  int64_t all_excess(size_t own) const {
    int64_t sum = 0;
    for (size_t p = 0; p < teams_.size(); ++p) {
      // A job that is stopped may free more than the excess.
      if (p != own && is_leaf(p) && held(p) > fair(p)) {
        sum += held(p) - teams_[p].secured;
      }
    }
    return sum;
  }
  bool is_leaf(size_t p) const {
    // A parent has no jobs, so that its running list is empty.
    return !teams_[p].running.empty();
  }

  // --- Starts

  void line_up() {
    for (auto& team : teams_) {
      team.waiting.clear();
      team.next = 0;
      team.secured_blocked = team.blocked = kNone;
    }
    for (size_t j = 0; j < counts_.size(); ++j) {
      if (counts_[j] == 0) teams_[project(j)].waiting.push_back(j);
    }
    for (auto& team : teams_) {
      std::ranges::sort(team.waiting, [&](size_t a, size_t b) {
        const Rank of_a = rank(a), of_b = rank(b);
        return std::tuple(of_b, job(a).submitted, job(a).id) <
               std::tuple(of_a, job(b).submitted, job(b).id);
      });
    }
  }

  bool is_aged(size_t j) const {
    return job(j).devices.empty() &&
           state_.now - job(j).waiting_since >= state_.rules.patience_seconds;
  }

  // Starts the job on its least number of devices, or says why not.
  std::optional<Reason> try_start(size_t j) {
    const size_t p = project(j);
    const int64_t need = least_[j];
    const int64_t secured = secured_of(j, need);
    if (secured > 0 &&
        teams_[p].secured + secured > state_.projects[p].guaranteed) {
      return Reason::guarantee;
    }
    const size_t mark = log_.size();
    young_ = false;
    const auto fail = [&](Reason reason) {
      undo(mark);
      return young_ ? Reason::young : reason;
    };
    if (const int64_t over = excess(p, need); over > 0) {
      if (take_own(p, rank(j), over) < over) return fail(Reason::limit);
    }
    if (int64_t over = parent_excess(p, need); over > 0) {
      if (held(p) + need <= fair(p)) {
        take_excess(p, state_.projects[p].parent, over, true);
        over = parent_excess(p, need);
      }
      if (over > 0 && take_own(p, rank(j), over) < over) {
        return fail(Reason::parent_limit);
      }
    }
    if (idle_ < need) {
      if (idle_ + all_excess(p) + held(p) < need) return fail(Reason::devices);
      // What goes beyond its fair share only its own project can give.
      const int64_t own =
          std::clamp<int64_t>(held(p) + need - fair(p), 0, need - idle_);
      if (own > 0) take_own(p, rank(j), own);
      if (idle_ < need && held(p) + need <= fair(p)) {
        take_excess(p, -1, need - idle_, true);
      }
      if (idle_ < need) take_own(p, rank(j), need - idle_);
      if (idle_ < need) return fail(Reason::devices);
    }
    log_.clear();
    set(j, need);
    teams_[p].running.push_back(j);
    return std::nullopt;
  }

  // The project whose next job is tried next: one within its guarantee, then
  // the least saturated one.
  size_t next_team() const {
    size_t best = kNone;
    std::pair<bool, double> key_of_best;
    for (size_t p = 0; p < teams_.size(); ++p) {
      const Team& team = teams_[p];
      if (team.next == team.waiting.size()) continue;
      const std::pair key(
          !within_guarantee(p, least_of_next(team)), saturation(p));
      if (best == kNone || key < key_of_best) {
        best = p;
        key_of_best = key;
      }
    }
    return best;
  }
  int64_t least_of_next(const Team& team) const {
    // A job that fits nowhere is within no guarantee.
    return std::min<int64_t>(least_[team.waiting[team.next]], int64_t{1} << 40);
  }

  bool start_all() {
    bool started = false;
    int64_t version = ++version_;
    for (size_t p; (p = next_team()) != kNone;) {
      Team& team = teams_[p];
      const size_t j = team.waiting[team.next++];
      if (counts_[j] > 0) continue;
      if (!state_.starts || least_[j] == kNoLimit || moved_[j]) {
        note(j, state_.starts ? Reason::devices : Reason::closed, kNone);
        continue;
      }
      const bool secured = job(j).kept != Kept::none;
      const size_t before = secured ? team.secured_blocked : kNone;
      if (before != kNone || team.blocked != kNone) {
        note(j, Reason::behind, before != kNone ? before : team.blocked);
        continue;
      }
      Failure& failure = team.failures[static_cast<size_t>(job(j).kept)];
      std::optional<Reason> reason;
      if (failure.version == version && least_[j] >= failure.least) {
        reason = failure.reason;
      } else {
        reason = try_start(j);
        if (reason) failure = {version, least_[j], *reason};
      }
      if (!reason) {
        started = true;
        version = ++version_;
        continue;
      }
      note(j, *reason, kNone);
      if (secured) team.secured_blocked = j;
      if (is_aged(j)) block(j, *reason);
    }
    return started;
  }

  // Nobody overtakes a job that has waited too long for room below a limit, or
  // in its project's fair share: the others end, and then it starts on what is
  // idle and what those have that are above theirs. Larger than the fair share,
  // it would lose its devices again at once.
  void block(size_t j, Reason reason) {
    const size_t p = project(j);
    if (reason == Reason::guarantee) return;
    const bool parent_is_full = parent_excess(p, least_[j]) > 0;
    if (parent_is_full || excess(p, least_[j]) > 0 || least_[j] <= fair(p)) {
      teams_[p].blocked = j;
    }
    if (!parent_is_full) return;
    for (size_t other = 0; other < teams_.size(); ++other) {
      if (state_.projects[other].parent == state_.projects[p].parent &&
          !within_guarantee(other, 1)) {
        teams_[other].blocked = j;
      }
    }
  }

  void note(size_t j, Reason reason, size_t other) {
    const Team& team = teams_[project(j)];
    Waiting& why = why_[j];
    why = {.job = j, .reason = reason};
    why.before = std::max<int64_t>(0, static_cast<int64_t>(team.next) - 1);
    if (other != kNone) why.other_job = static_cast<int64_t>(other);
  }

  // --- Growth

  bool may_grow(size_t j, int64_t step) const {
    const size_t p = project(j);
    const Team& team = teams_[p];
    if (moved_[j] || team.blocked != kNone) return false;
    if (excess(p, step) > 0 || parent_excess(p, step) > 0) return false;
    if (job(j).kept == Kept::all &&
        (team.secured + step > state_.projects[p].guaranteed ||
         team.secured_blocked != kNone)) {
      return false;
    }
    return step <= idle_ ||
           (held(p) + step <= fair(p) && step <= idle_ + all_excess(p));
  }

  // Gives idle devices to jobs that can use more: first to the least saturated
  // project, and to the smallest of its jobs of one rank.
  bool grow_all() {
    // What a job that moves leaves is kept for its next start.
    if (!state_.starts || moves_) return false;
    bool grew = false;
    full_.assign(full_.size(), false);
    // Each device is given a few times at most; the bound is for a wrong rule.
    for (size_t steps = 0; steps <= 4 * state_.devices.size(); ++steps) {
      size_t best = kNone;
      const auto key = [&](size_t j) {
        const Rank of_j = rank(j);
        return std::tuple(
            saturation(project(j)), !of_j.first, -of_j.second, counts_[j],
            job(j).started, job(j).id);
      };
      for (const Team& team : teams_) {
        for (const size_t j : team.running) {
          if (counts_[j] == 0 || full_[j]) continue;
          const int64_t size = next_size(j);
          if (size == 0 || !may_grow(j, size - counts_[j])) continue;
          if (best == kNone || key(j) < key(best)) best = j;
        }
      }
      if (best == kNone) return grew;
      const size_t mark = log_.size();
      const int64_t size = next_size(best);
      const int64_t step = size - counts_[best];
      if (idle_ < step) take_excess(project(best), -1, step - idle_, false);
      if (idle_ < step) {
        undo(mark);
        full_[best] = true;
        continue;
      }
      log_.clear();
      set(best, size);
      grew = true;
    }
    return grew;
  }

  // --- The result

  Decision result() {
    Decision decision;
    const auto placed = place(state_, counts_);
    for (const auto kind :
         {Order::Kind::stop, Order::Kind::shrink, Order::Kind::start,
          Order::Kind::grow}) {
      for (size_t j = 0; j < counts_.size(); ++j) {
        const auto before = static_cast<int64_t>(job(j).devices.size());
        if (counts_[j] == before || kind_of(before, counts_[j]) != kind) {
          continue;
        }
        decision.orders.push_back({kind, j, placed[j]});
      }
    }
    for (const Team& team : teams_) {
      decision.fair_share.push_back(team.fair);
      decision.held.push_back(team.held);
    }
    for (size_t j = 0; j < counts_.size(); ++j) {
      if (counts_[j] > 0) continue;
      Waiting why = why_[j];
      const size_t p = project(j);
      why.job = j;
      why.idle = idle_;
      why.held = held(p);
      why.fair = fair(p);
      why.secured = teams_[p].secured;
      if (const int parent = state_.projects[p].parent; parent >= 0) {
        why.parent_held = held(static_cast<size_t>(parent));
      }
      decision.waiting.push_back(why);
    }
    return decision;
  }

  static Order::Kind kind_of(int64_t before, int64_t after) {
    if (after == 0) return Order::Kind::stop;
    if (before == 0) return Order::Kind::start;
    return after < before ? Order::Kind::shrink : Order::Kind::grow;
  }

  const State& state_;
  int64_t idle_ = 0;
  std::vector<int64_t> counts_;  // devices of each job
  std::vector<int64_t> least_;
  std::vector<bool> moved_;  // off unusable devices: they start the next time
  bool moves_ = false;
  std::vector<bool> full_;
  std::vector<Team> teams_;  // one for each project
  std::vector<Waiting> why_;
  std::vector<std::pair<size_t, int64_t>> log_;  // jobs and their old counts
  bool young_ = false;  // a job was not stopped because it has just started
  int64_t version_ = 0;
};

}  // namespace

Decision decide(const State& state) {
  return Decider(state).run();
}

State after(State state, const Decision& decision) {
  for (const Order& order : decision.orders) {
    Job& job = state.jobs[order.job];
    if (job.devices.empty()) job.started = state.now;
    if (order.devices.empty()) job.waiting_since = state.now;
    job.devices = order.devices;
  }
  return state;
}

std::string text_of(const State& state, const Waiting& waiting) {
  const Job& job = state.jobs[waiting.job];
  const Project& project = state.projects[static_cast<size_t>(job.project)];
  const std::string needs = format("it needs {}", counted(job.least, "device"));
  const std::string idle = format(
      "{} idle", waiting.idle == 0   ? "none is"
                 : waiting.idle == 1 ? std::string("1 is")
                                     : format("{} are", waiting.idle));
  switch (waiting.reason) {
    case Waiting::Reason::closed:
      return "the pool is drained: no job starts until `echelon pool drain "
             "--undo`";
    case Waiting::Reason::guarantee:
      return format(
          "it may not be pre-empted, so it needs {} of the guarantee of {}, "
          "and {} of its {} cannot be taken from others; --preemptible may "
          "borrow",
          job.least, project.name, waiting.secured, project.guaranteed);
    case Waiting::Reason::limit:
      return format(
          "{}, and {} holds {} of its limit of {}", needs, project.name,
          waiting.held, project.limit);
    case Waiting::Reason::parent_limit: {
      const Project& parent =
          state.projects[static_cast<size_t>(project.parent)];
      return format(
          "{}, and {} of {} holds {} of its limit of {}", needs, parent.name,
          project.name, waiting.parent_held, parent.limit);
    }
    case Waiting::Reason::behind: {
      const Job& other = state.jobs[static_cast<size_t>(waiting.other_job)];
      return format(
          "job {} of {} is before it", other.id,
          state.projects[static_cast<size_t>(other.project)].name);
    }
    case Waiting::Reason::young:
      return format(
          "{}; {}, and jobs that would make room run for less than {} yet",
          needs, idle, format_seconds(state.rules.least_seconds));
    case Waiting::Reason::devices:
      break;
  }
  if (waiting.held + job.least > waiting.fair) {
    return format(
        "{}; {}, and with it {} would hold {}, above its fair share of {}, so "
        "that it takes none back",
        needs, idle, project.name, waiting.held + job.least, waiting.fair);
  }
  return format(
      "{}; {}, and no project holds more than its fair share", needs, idle);
}

}  // namespace echelon::pool
