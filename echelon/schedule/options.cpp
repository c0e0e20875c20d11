// Each generator writes the list of one rank at a time, as a warm-up, a steady
// state and a cool-down, with RankBuilder counting the microbatches. options.h
// describes the schedules and cites their papers. The checker, not the
// generators, proves them valid.
#include "echelon/schedule/options.h"

#include <algorithm>
#include <array>
#include <deque>

#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

size_t at(int32_t index) {
  return static_cast<size_t>(index);
}

// An empty schedule in which rank r holds the stages r, r + p, r + 2p …
Schedule looped(int32_t ranks, int32_t microbatches, int32_t per_rank) {
  Schedule schedule{.name = {}, .num_microbatches = microbatches};
  schedule.ranks.resize(at(ranks));
  for (int32_t stage = 0; stage < ranks * per_rank; ++stage) {
    schedule.rank_of_stage.push_back(stage % ranks);
  }
  return schedule;
}

// An empty schedule of two stages a rank in the shape of a V: rank r holds the
// stages r and 2p - 1 - r, so the last rank passes its output to itself.
Schedule folded(int32_t ranks, int32_t microbatches) {
  Schedule schedule = looped(ranks, microbatches, 2);
  for (int32_t stage = ranks; stage < 2 * ranks; ++stage) {
    schedule.rank_of_stage[at(stage)] = 2 * ranks - 1 - stage;
  }
  return schedule;
}

// Writes one rank's list. Each call adds the next microbatch of its kind for
// the rank's `local`-th stage, counted from 0 in ascending order. Microbatches
// past the last are counted but not written: a generator may thus write the
// schedule of more microbatches than there are, and what remains is in order.
class RankBuilder {
 public:
  RankBuilder(Schedule& schedule, int32_t rank)
      : actions_(schedule.ranks[at(rank)]),
        num_microbatches_(schedule.num_microbatches) {
    // The rank holds one of each p stages, counted from this or the other end.
    const int32_t ranks = schedule.num_ranks();
    for (int32_t base = 0; base < schedule.num_stages(); base += ranks) {
      const bool same = schedule.rank_of_stage[at(base + rank)] == rank;
      stages_.push_back(base + (same ? rank : ranks - 1 - rank));
    }
    counts_.resize(stages_.size());
  }
  ~RankBuilder() { actions_.shrink_to_fit(); }
  RankBuilder(const RankBuilder&) = delete;
  RankBuilder& operator=(const RankBuilder&) = delete;

  void forward(int32_t local) { add(ActionKind::forward, local); }
  void backward(int32_t local) { add(ActionKind::backward, local); }
  void backward_input(int32_t local) { add(ActionKind::backward_input, local); }
  void backward_weight(int32_t local) {
    add(ActionKind::backward_weight, local);
  }
  void split_backward(int32_t local) {
    backward_input(local);
    backward_weight(local);
  }
  // How many were added of `kind`; B counts as I and as W too.
  int32_t count(ActionKind kind, int32_t local) const {
    return counts_[at(local)][static_cast<size_t>(kind)];
  }

 private:
  using Counts = std::array<int32_t, 4>;

  void add(ActionKind kind, int32_t local) {
    Counts& counts = counts_[at(local)];
    const auto next = [&](ActionKind counted) -> int32_t& {
      return counts[static_cast<size_t>(counted)];
    };
    const bool whole = kind == ActionKind::backward;
    const int32_t microbatch =
        next(whole ? ActionKind::backward_input : kind)++;
    if (whole) {
      ++next(ActionKind::backward_weight);
      ++next(ActionKind::backward);
    }
    if (microbatch < num_microbatches_) {
      actions_.push_back({kind, stages_[at(local)], microbatch});
    }
  }

  std::vector<Action>& actions_;
  std::vector<int32_t> stages_;
  std::vector<Counts> counts_;
  int32_t num_microbatches_;
};

// The rank's stage at each step: rounds of microbatches pass through all of its
// stages. Backwards see the stages from the other end.
std::vector<int32_t>
stage_by_step(int32_t ranks, int32_t microbatches, int32_t per_rank) {
  const int32_t rounds = std::max(1, microbatches / ranks);
  std::vector<int32_t> stages;
  stages.reserve(static_cast<size_t>(microbatches) * per_rank);
  for (int32_t round = 0; round < rounds; ++round) {
    const int32_t length =
        microbatches / rounds + (round < microbatches % rounds ? 1 : 0);
    for (int32_t local = 0; local < per_rank; ++local) {
      stages.insert(stages.end(), static_cast<size_t>(length), local);
    }
  }
  return stages;
}

// The stages of a V's rank.
constexpr int32_t kDown = 0;
constexpr int32_t kUp = 1;

class ZbV {
 public:
  ZbV(Schedule& schedule, int32_t rank, int32_t ranks, int32_t microbatches)
      : list_(schedule, rank),
        before_(rank),
        after_(ranks - rank),
        microbatches_(microbatches) {}

  void write() {
    warm_up();
    while (list_.count(ActionKind::forward, kDown) < microbatches_ ||
           list_.count(ActionKind::forward, kUp) < microbatches_) {
      if (list_.count(ActionKind::forward, kDown) < microbatches_) {
        list_.forward(kDown);
      }
      list_.split_backward(kDown);
      list_.forward(kUp);
      list_.split_backward(kUp);
    }
    cool_down();
  }

 private:
  // Until the first microbatch has gone down, up and is about to come back.
  void warm_up() {
    for (int32_t i = 0; i < 2 * after_ - 1; ++i) list_.forward(kDown);
    for (int32_t i = 0; i < before_; ++i) {
      list_.forward(kUp);
      list_.forward(kDown);
    }
    for (int32_t i = 0; i < after_; ++i) {
      list_.forward(kUp);
      list_.split_backward(kUp);
    }
  }

  // The other ranks wait for the I; the remaining W come last.
  void cool_down() {
    for (int32_t i = 0; i < before_; ++i) {
      list_.backward_input(kDown);
      list_.backward_input(kUp);
    }
    for (int32_t i = 0; i < after_; ++i) list_.split_backward(kDown);
    for (const int32_t local : {kUp, kDown}) {
      while (list_.count(ActionKind::backward_weight, local) < microbatches_) {
        list_.backward_weight(local);
      }
    }
  }

  RankBuilder list_;
  int32_t before_;  // ranks before this one
  int32_t after_;   // this one and those after it
  int32_t microbatches_;
};

class DualPipeV {
 public:
  DualPipeV(Schedule& schedule, int32_t rank, int32_t ranks)
      : list_(schedule, rank),
        upto_(rank + 1),
        after_(ranks - 1 - rank),
        pairs_(schedule.num_microbatches - 2 * ranks + rank + 1) {}

  void write() {
    warm_up();
    for (int32_t i = 0; i < pairs_; ++i) {
      forward_and_backward(kDown, kUp);
      forward_and_backward(kUp, kDown);
    }
    for (int32_t i = 0; i < after_; ++i) {
      list_.backward(kUp);
      forward_and_backward(kUp, kDown);
    }
    cool_down();
  }

 private:
  void forward_and_backward(int32_t forward, int32_t backward) {
    list_.forward(forward);
    list_.backward(backward);
  }

  void split_backward(int32_t local) {
    list_.backward_input(local);
    deferred_.push_back(local);
  }

  void oldest_weight() {
    if (deferred_.empty()) return;
    list_.backward_weight(deferred_.front());
    deferred_.pop_front();
  }

  void warm_up() {
    for (int32_t i = 0; i < 2 * after_; ++i) list_.forward(kDown);
    for (int32_t i = 0; i < upto_; ++i) {
      list_.forward(kDown);
      list_.forward(kUp);
    }
    for (int32_t i = 0; i < after_; ++i) {
      split_backward(kUp);
      oldest_weight();
      list_.forward(kUp);
    }
  }

  // The remaining backwards, up and down in turn. From the middle on they are
  // split, so that the ranks before this one have their gradients sooner.
  void cool_down() {
    const int32_t whole = upto_;  // of 2 * upto_ backwards
    for (int32_t i = 0; i < 2 * upto_; ++i) {
      const int32_t local = i % 2 == 0 ? kUp : kDown;
      i < whole ? list_.backward(local) : split_backward(local);
    }
    for (int32_t i = 0; i < after_; ++i) {
      oldest_weight();
      split_backward(kDown);
    }
    while (!deferred_.empty()) oldest_weight();
  }

  RankBuilder list_;
  std::deque<int32_t> deferred_;  // stages whose W is due, oldest first
  int32_t upto_;                  // this rank and those before it
  int32_t after_;                 // ranks after this one
  // The warm-up has 2 * after_ + upto_ of the forwards down; these are the
  // others.
  int32_t pairs_;
};

Schedule
one_forward_one_backward(int32_t ranks, int32_t microbatches, int32_t) {
  Schedule schedule = looped(ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    const int32_t warmup = std::min(ranks - 1 - rank, microbatches);
    for (int32_t m = 0; m < warmup; ++m) list.forward(0);
    for (int32_t m = warmup; m < microbatches; ++m) {
      list.forward(0);
      list.backward(0);
    }
    for (int32_t m = 0; m < warmup; ++m) list.backward(0);
  }
  return schedule;
}

Schedule interleaved(int32_t ranks, int32_t microbatches, int32_t v) {
  if (v == 1) return one_forward_one_backward(ranks, microbatches, v);
  Schedule schedule = looped(ranks, microbatches, v);
  const auto stages = stage_by_step(ranks, microbatches, v);
  const int32_t steps = v * microbatches;
  const int32_t rounds = std::max(1, microbatches / ranks);
  const int32_t longest = (microbatches + rounds - 1) / rounds;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    const auto local = [&](int32_t step) {
      return stages[static_cast<size_t>(step)];
    };
    // Megatron-LM's warm-up, with the longest round in place of p, since rounds
    // may be longer when p does not divide the microbatches.
    const int32_t warmup =
        std::min(steps, (v - 1) * longest + 2 * (ranks - 1 - rank));
    for (int32_t step = 0; step < steps + warmup; ++step) {
      if (step < steps) list.forward(local(step));
      if (step >= warmup) list.backward(v - 1 - local(step - warmup));
    }
  }
  return schedule;
}

Schedule breadth_first(int32_t ranks, int32_t microbatches, int32_t v) {
  Schedule schedule = looped(ranks, microbatches, v);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    for (int32_t local = 0; local < v; ++local) {
      for (int32_t m = 0; m < microbatches; ++m) list.forward(local);
    }
    for (int32_t local = v - 1; local >= 0; --local) {
      for (int32_t m = 0; m < microbatches; ++m) list.backward(local);
    }
  }
  return schedule;
}

// Each hop keeps `slack` more microbatches in flight, before I or before W.
template <int32_t slack>
Schedule zb_h(int32_t ranks, int32_t microbatches, int32_t) {
  Schedule schedule = looped(ranks, microbatches, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    RankBuilder list(schedule, rank);
    const int32_t warmup = slack * (ranks - 1 - rank);
    const int32_t delay = slack * rank;
    // Step k: forward of k, I of k - warmup, W of k - warmup - delay.
    const int32_t last = microbatches + warmup + delay;
    for (int32_t step = 0; step < last; ++step) {
      const int32_t input = step - warmup;
      if (step < microbatches) list.forward(0);
      if (input >= 0 && input < microbatches) list.backward_input(0);
      if (input >= delay) list.backward_weight(0);
    }
  }
  return schedule;
}

Schedule zb_v(int32_t ranks, int32_t microbatches, int32_t) {
  Schedule schedule = folded(ranks, microbatches);
  // The first rank's warm-up alone has 2p - 1 forwards.
  const int32_t written = std::max(microbatches, 2 * ranks - 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    ZbV(schedule, rank, ranks, written).write();
  }
  return schedule;
}

Schedule dualpipev(int32_t ranks, int32_t microbatches, int32_t) {
  Schedule schedule = folded(ranks, microbatches);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    DualPipeV(schedule, rank, ranks).write();
  }
  return schedule;
}

enum class PerRank { one, any, two };
enum class Forwards { first, in_turn };
enum class Backwards { whole, split };

struct Generator {
  const char* name;
  PerRank per_rank;
  Forwards forwards;
  Backwards backwards;
  Schedule (*make)(int32_t ranks, int32_t microbatches, int32_t per_rank);
};

// In the order of ScheduleKind.
constexpr std::array<Generator, kScheduleKinds.size()> kGenerators = {{
    {"gpipe", PerRank::one, Forwards::first, Backwards::whole, breadth_first},
    {"1f1b", PerRank::one, Forwards::in_turn, Backwards::whole,
     one_forward_one_backward},
    {"interleaved", PerRank::any, Forwards::in_turn, Backwards::whole,
     interleaved},
    {"breadth_first", PerRank::any, Forwards::first, Backwards::whole,
     breadth_first},
    {"zb-h1", PerRank::one, Forwards::in_turn, Backwards::split, zb_h<1>},
    {"zb-h2", PerRank::one, Forwards::in_turn, Backwards::split, zb_h<2>},
    {"zb-v", PerRank::two, Forwards::in_turn, Backwards::split, zb_v},
    {"dualpipev", PerRank::two, Forwards::in_turn, Backwards::split, dualpipev},
}};

const Generator& generator_of(ScheduleKind kind) {
  return kGenerators.at(static_cast<size_t>(kind));
}

constexpr int64_t kMaxRanks = 1 << 14;
constexpr int64_t kMaxStages = 1 << 20;

[[noreturn]] void refuse(const std::string& kind, const std::string& what) {
  throw ConfigError("schedule " + kind + ": " + what);
}

void check_range(
    const std::string& kind, const std::string& what, int64_t value,
    int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return;
  refuse(
      kind, format(
                "{} = {}, but must be from {} to {}; the nearest is {}", what,
                value, lowest, highest, std::clamp(value, lowest, highest)));
}

void check_per_rank(const Generator& generator, int32_t per_rank) {
  if (generator.per_rank == PerRank::one && per_rank != 1) {
    refuse(
        generator.name, "stages per rank = " + std::to_string(per_rank) +
                            ", but it is defined for 1 alone; interleaved and "
                            "breadth_first take any number");
  }
  if (generator.per_rank == PerRank::two && per_rank != 2) {
    refuse(
        generator.name, format(
                            "stages per rank = {}, but its V has 2 on each "
                            "rank: leave it out or say 2",
                            per_rank));
  }
}

void check_options(const Generator& generator, const ScheduleOptions& options) {
  const std::string kind = generator.name;
  check_range(kind, "ranks", options.ranks, 1, kMaxRanks);
  check_range(
      kind, "stages per rank", options.stages_per_rank, 1,
      kMaxStages / options.ranks);
  check_range(kind, "microbatches", options.microbatches, 1, kMaxScheduleCells);
  check_per_rank(generator, options.stages_per_rank);
  const int64_t stages = int64_t{options.ranks} * options.stages_per_rank;
  if (stages * options.microbatches > kMaxScheduleCells) {
    refuse(
        kind,
        format(
            "{} stages x {} microbatches are more than {} cells; ask for fewer",
            stages, options.microbatches, kMaxScheduleCells));
  }
  if (options.kind == ScheduleKind::dualpipev &&
      options.microbatches < stages) {
    refuse(
        kind, format(
                  "microbatches = {}, but {} ranks need at least twice as "
                  "many: take {} microbatches, or {}",
                  options.microbatches, options.ranks, stages,
                  options.microbatches < 2
                      ? "zb-v, which takes any number"
                      : counted(options.microbatches / 2, "rank")));
  }
}

[[noreturn]] void refuse(
    const PipelineLayout& options, const std::string& has,
    const std::string& but) {
  throw ConfigError(format(
      "[layout] schedule_file = \"{}\" has {}, but {}", options.schedule_file,
      has, but));
}

void check_file(
    const PipelineLayout& options, const Schedule& schedule, int64_t ranks) {
  if (schedule.num_ranks() != ranks) {
    refuse(
        options, counted(schedule.num_ranks(), "row") + ", one for each rank",
        format("pp = {}; set pp to {}", ranks, schedule.num_ranks()));
  }
  if (options.microbatches > 0 &&
      options.microbatches != schedule.num_microbatches) {
    refuse(
        options, counted(schedule.num_microbatches, "microbatch"),
        format(
            "microbatches = {}; leave that out or change one",
            options.microbatches));
  }
  for (int32_t rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto held = schedule.stages_of(rank).size();
    if (options.stages_per_rank > 0 &&
        held != static_cast<size_t>(options.stages_per_rank)) {
      refuse(
          options,
          format(
              "{} {} on rank {}", held, held == 1 ? "stage" : "stages", rank),
          format(
              "stages_per_rank = {}; leave that out or change one",
              options.stages_per_rank));
    }
  }
}

int32_t narrow(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, -1, INT32_MAX));
}

}  // namespace

std::string to_string(ScheduleKind kind) {
  return generator_of(kind).name;
}

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& generator : kGenerators) all.push_back(generator.name);
    return all;
  }();
  return names;
}

ScheduleKind schedule_kind(std::string_view name) {
  for (const ScheduleKind kind : kScheduleKinds) {
    if (name == generator_of(kind).name) return kind;
  }
  throw ConfigError(format(
      "schedule \"{}\": must be one of {}{}", name,
      join(schedule_names(), ", "),
      config::did_you_mean(std::string(name), schedule_names())));
}

int32_t stages_per_rank_of(ScheduleKind kind) {
  return generator_of(kind).per_rank == PerRank::one ? 1 : 2;
}

bool takes_any_stages(ScheduleKind kind) {
  return generator_of(kind).per_rank == PerRank::any;
}

bool is_v_shaped(ScheduleKind kind) {
  return generator_of(kind).per_rank == PerRank::two;
}

bool forwards_first(ScheduleKind kind) {
  return generator_of(kind).forwards == Forwards::first;
}

bool splits_backward(ScheduleKind kind) {
  return generator_of(kind).backwards == Backwards::split;
}

Schedule make_schedule(const ScheduleOptions& options) {
  const Generator& generator = generator_of(options.kind);
  ScheduleOptions resolved = options;
  if (resolved.stages_per_rank == 0) {
    resolved.stages_per_rank = stages_per_rank_of(options.kind);
  }
  check_options(generator, resolved);
  Schedule schedule = generator.make(
      resolved.ranks, resolved.microbatches, resolved.stages_per_rank);
  schedule.name = generator.name;
  return schedule;
}

void bind(config::Section& section, PipelineLayout& options) {
  section.field(
      "microbatches", options.microbatches,
      "parts of a batch that pass through the pipeline one after the other; 0: "
      "as many as divide it, up to 4 for each pipeline rank",
      {.at_least = 0, .at_most = 1 << 20});
  std::string schedule = to_string(options.schedule);
  section
      .field(
          "schedule", schedule,
          "order in which a pipeline's ranks compute (see echelon schedule)")
      .one_of(schedule_names());
  if (std::ranges::count(schedule_names(), schedule) > 0) {
    options.schedule = schedule_kind(schedule);
  }
  section.field(
      "stages_per_rank", options.stages_per_rank,
      "pipeline stages that each rank holds; 0: what the schedule takes",
      {.at_least = 0, .at_most = 1 << 10});
  section.field(
      "schedule_file", options.schedule_file,
      "your own schedule, in place of the three above: CSV as `echelon "
      "schedule --format csv` writes it");
}

Schedule make_schedule(const PipelineLayout& options, int64_t ranks) {
  if (!options.schedule_file.empty()) {
    Schedule schedule = read_schedule_csv(options.schedule_file);
    check(schedule);
    check_file(options, schedule, ranks);
    return schedule;
  }
  const int64_t microbatches =
      options.microbatches > 0 ? options.microbatches : 4 * ranks;
  Schedule schedule = make_schedule(ScheduleOptions{
      .kind = options.schedule,
      .ranks = narrow(ranks),
      .microbatches = narrow(microbatches),
      .stages_per_rank = narrow(options.stages_per_rank)});
  check(schedule);
  return schedule;
}

}  // namespace echelon
