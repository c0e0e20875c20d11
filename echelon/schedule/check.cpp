// One byte for each stage and microbatch has a bit for each kind of action seen
// so far; one pass over the lists in order finds actions that are repeated, out
// of order or missing. The number of actions is compared first, so that a file
// which names huge numbers but few actions allocates nothing for them. A
// deadlock is found by running the lists (walk.h). Each rank that is stuck then
// waits for one that is stuck, so following them leads into the circle that the
// message names.
#include "echelon/schedule/check.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/schedule/walk.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

using Kind = ActionKind;

uint8_t bit(Kind kind) {
  return static_cast<uint8_t>(1u << static_cast<unsigned>(kind));
}

class Checker {
 public:
  explicit Checker(const Schedule& schedule) : schedule_(schedule) {}

  void run() {
    check_sizes();
    check_stages();
    check_number();
    seen_.resize(detail::cell(schedule_, schedule_.num_stages(), 0));
    for (int32_t rank = 0; rank < schedule_.num_ranks(); ++rank) {
      const auto& list = schedule_.ranks[static_cast<size_t>(rank)];
      for (size_t i = 0; i < list.size(); ++i) {
        check_action({rank, i, list[i]});
      }
    }
    check_missing();
    check_deadlock();
  }

 private:
  [[noreturn]] void refuse(const std::string& fault) const {
    throw ConfigError("schedule " + schedule_.name + ": " + fault);
  }

  // An action in its rank's list.
  struct Place {
    int32_t rank;
    size_t index;
    const Action& action;

    // "rank 1, action 3 (1B0)"; actions are counted from 1.
    std::string text() const {
      return format(
          "rank {}, action {} ({})", rank, index + 1, to_string(action));
    }
  };

  [[noreturn]] void refuse(const Place& at, const std::string& fault) const {
    refuse(at.text() + " " + fault);
  }

  void check_sizes() const {
    if (schedule_.num_microbatches < 1) {
      refuse(
          counted(schedule_.num_microbatches, "microbatch") +
          ", but there must be at least one");
    }
    if (schedule_.ranks.empty())
      refuse("there are no ranks; name at least one");
    if (schedule_.rank_of_stage.empty()) {
      refuse("there are no stages; give each rank at least one");
    }
  }

  void check_stages() const {
    std::vector<bool> holds(schedule_.ranks.size());
    for (int32_t stage = 0; stage < schedule_.num_stages(); ++stage) {
      const int32_t rank = owner(stage);
      if (rank < 0 || rank >= schedule_.num_ranks()) {
        refuse(format(
            "stage {} is on no rank{}; there are {}, from 0; some rank must "
            "run its actions",
            stage, rank < 0 ? "" : format(": it names rank {}", rank),
            counted(schedule_.num_ranks(), "rank")));
      }
      holds[static_cast<size_t>(rank)] = true;
    }
    const auto idle = std::ranges::find(holds, false);
    if (idle != holds.end()) {
      refuse(format(
          "rank {} holds no stage; give it one, or use fewer ranks",
          idle - holds.begin()));
    }
  }

  // Finds a schedule that lacks most of its actions without a table of all.
  void check_number() const {
    std::vector<std::pair<int32_t, int32_t>> forwards;
    size_t actions = 0;
    for (const auto& list : schedule_.ranks) actions += list.size();
    if (detail::cell(schedule_, schedule_.num_stages(), 0) <= actions) return;
    for (const auto& list : schedule_.ranks) {
      for (const auto& action : list) {
        if (action.kind != Kind::forward) continue;
        forwards.emplace_back(action.stage, action.microbatch);
      }
    }
    std::ranges::sort(forwards);
    std::pair<int32_t, int32_t> next = {0, 0};
    for (const auto& [stage, microbatch] : forwards) {
      if (std::pair(stage, microbatch) < next) continue;
      if (std::pair(stage, microbatch) > next) break;
      if (++next.second == schedule_.num_microbatches) next = {stage + 1, 0};
    }
    missing(next.first, next.second, Kind::forward);
  }

  int32_t owner(int32_t stage) const {
    return schedule_.rank_of_stage[static_cast<size_t>(stage)];
  }

  void check_action(const Place& at) {
    const Action& action = at.action;
    if (action.stage < 0 || action.stage >= schedule_.num_stages()) {
      refuse(
          at, format(
                  "is of stage {}, but there are {}, from 0", action.stage,
                  counted(schedule_.num_stages(), "stage")));
    }
    if (action.microbatch < 0 ||
        action.microbatch >= schedule_.num_microbatches) {
      refuse(
          at, format(
                  "is of microbatch {}, but there are {}, from 0",
                  action.microbatch, schedule_.num_microbatches));
    }
    if (owner(action.stage) != at.rank) {
      refuse(
          at,
          format(
              "is of a stage that rank {} holds; a stage is computed by one "
              "rank alone",
              owner(action.stage)));
    }
    check_order(at);
    seen_[detail::cell(schedule_, action.stage, action.microbatch)] |=
        bit(action.kind);
  }

  void check_order(const Place& at) const {
    const Action& action = at.action;
    const uint8_t seen =
        seen_[detail::cell(schedule_, action.stage, action.microbatch)];
    const auto other = [&](Kind kind) {
      return to_string({kind, action.stage, action.microbatch});
    };
    if (seen & bit(action.kind)) {
      refuse(
          at, format(
                  "is repeated; it stands as action {} already: remove one",
                  first(at)));
    }
    const bool whole = action.kind == Kind::backward;
    const bool split = action.kind == Kind::backward_input ||
                       action.kind == Kind::backward_weight;
    for (const Kind kind :
         {Kind::backward_input, Kind::backward_weight, Kind::backward}) {
      if ((whole || (split && kind == Kind::backward)) && seen & bit(kind)) {
        refuse(
            at, format(
                    "stands beside {}; a backward is either B, or I and W: "
                    "remove one",
                    other(kind)));
      }
    }
    if (action.kind != Kind::forward && !(seen & bit(Kind::forward))) {
      refuse(
          at, "comes before its forward " + other(Kind::forward) +
                  "; put that before it");
    }
    if (action.kind == Kind::backward_weight &&
        !(seen & bit(Kind::backward_input))) {
      refuse(
          at, "comes before " + other(Kind::backward_input) +
                  ", from which it has its gradients; put that before it");
    }
  }

  // The number of the first such action of the rank.
  int64_t first(const Place& at) const {
    const auto& list = schedule_.ranks[static_cast<size_t>(at.rank)];
    return std::ranges::find(list, at.action) - list.begin() + 1;
  }

  void check_missing() const {
    for (int32_t stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int32_t m = 0; m < schedule_.num_microbatches; ++m) {
        const uint8_t seen = seen_[detail::cell(schedule_, stage, m)];
        if (!(seen & bit(Kind::forward))) missing(stage, m, Kind::forward);
        if (seen & bit(Kind::backward)) continue;
        if (!(seen & bit(Kind::backward_input))) {
          missing(stage, m, Kind::backward);
        }
        if (!(seen & bit(Kind::backward_weight))) {
          missing(stage, m, Kind::backward_weight);
        }
      }
    }
  }

  [[noreturn]] void
  missing(int32_t stage, int32_t microbatch, Kind kind) const {
    std::string rule = "each stage computes each of the " +
                       counted(schedule_.num_microbatches, "microbatch") +
                       " forwards and backwards";
    if (kind == Kind::backward) rule += ", by B, or by I and W";
    if (kind == Kind::backward_weight) rule = "I and W are one backward";
    refuse(format(
        "rank {} lacks {}; {}", owner(stage),
        to_string({kind, stage, microbatch}), rule));
  }

  void check_deadlock() const {
    detail::Walk walk(schedule_);
    if (walk.run([](int32_t, size_t, const Action&) {})) return;
    // Each stuck rank waits for another stuck rank, so that following them
    // leads into a circle.
    int32_t rank = 0;
    while (!stuck(walk, rank)) ++rank;
    std::vector<int32_t> path;
    while (std::ranges::find(path, rank) == path.end()) {
      path.push_back(rank);
      rank = owner(needed(walk, rank).stage);
    }
    path.erase(path.begin(), std::ranges::find(path, rank));
    refuse(circle(walk, path));
  }

  bool stuck(const detail::Walk& walk, int32_t rank) const {
    return walk.next(rank) < schedule_.ranks[static_cast<size_t>(rank)].size();
  }

  const Action& first_stuck(const detail::Walk& walk, int32_t rank) const {
    return schedule_.ranks[static_cast<size_t>(rank)][walk.next(rank)];
  }

  // The action whose result the rank waits for.
  Action needed(const detail::Walk& walk, int32_t rank) const {
    const Action& action = first_stuck(walk, rank);
    Action result = action;
    result.stage = detail::needed_stage(action, schedule_.num_stages());
    if (action.kind == Kind::forward) return result;
    const uint8_t seen =
        seen_[detail::cell(schedule_, result.stage, result.microbatch)];
    result.kind =
        seen & bit(Kind::backward) ? Kind::backward : Kind::backward_input;
    return result;
  }

  std::string
  circle(const detail::Walk& walk, const std::vector<int32_t>& path) const {
    constexpr size_t kMostNamed = 4;
    std::string text = "deadlock: ";
    for (size_t i = 0; i < std::min(path.size(), kMostNamed); ++i) {
      const int32_t rank = path[i];
      const Action result = needed(walk, rank);
      text += format(
          "{}{} waits for {} of rank {}{}", i == 0 ? "" : "; ",
          Place{rank, walk.next(rank), first_stuck(walk, rank)}.text(),
          to_string(result), owner(result.stage),
          path.size() == 1 ? " itself, which comes later" : "");
    }
    if (path.size() > kMostNamed) {
      text += format(
          "; and so on through {}",
          counted(static_cast<int64_t>(path.size() - kMostNamed), "more rank"));
    }
    return text + "; none of them can go on: change the order of one";
  }

  const Schedule& schedule_;
  std::vector<uint8_t> seen_;  // by stage and microbatch, a bit for each kind
};

}  // namespace

void check(const Schedule& schedule) {
  Checker(schedule).run();
}

}  // namespace echelon
