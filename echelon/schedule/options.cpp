#include "echelon/schedule/options.h"

#include <algorithm>
#include <array>

#include "echelon/error.h"
#include "echelon/schedule/generators.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

enum class PerRank { one, any, two };

struct Generator {
  const char* kind;
  PerRank per_rank;
  Schedule (*make)(int32_t ranks, int32_t microbatches, int32_t per_rank);
};

template <Schedule (*make)(int32_t, int32_t)>
Schedule fixed(int32_t ranks, int32_t microbatches, int32_t) {
  return make(ranks, microbatches);
}

constexpr std::array kGenerators = {
    Generator{"gpipe", PerRank::one, fixed<make_gpipe>},
    Generator{"1f1b", PerRank::one, fixed<make_1f1b>},
    Generator{"interleaved", PerRank::any, make_interleaved},
    Generator{"breadth_first", PerRank::any, make_breadth_first},
    Generator{"zb-h1", PerRank::one, fixed<make_zb_h1>},
    Generator{"zb-h2", PerRank::one, fixed<make_zb_h2>},
    Generator{"zb-v", PerRank::two, fixed<make_zb_v>},
    Generator{"dualpipev", PerRank::two, fixed<make_dualpipev>},
};

constexpr int64_t kMaxRanks = 1 << 14;
constexpr int64_t kMaxStages = 1 << 20;

const Generator& find(const std::string& kind) {
  for (const auto& generator : kGenerators) {
    if (kind == generator.kind) return generator;
  }
  std::string all;
  for (const auto& name : schedule_kinds()) {
    all += (all.empty() ? "" : ", ") + name;
  }
  throw ConfigError(format(
      "schedule \"{}\": must be one of {}{}", kind, all,
      config::did_you_mean(kind, schedule_kinds())));
}

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
        generator.kind, "stages per rank = " + std::to_string(per_rank) +
                            ", but it is defined for 1 alone; interleaved and "
                            "breadth_first take any number");
  }
  if (generator.per_rank == PerRank::two && per_rank != 2) {
    refuse(
        generator.kind, format(
                            "stages per rank = {}, but its V has 2 on each "
                            "rank: leave it out or say 2",
                            per_rank));
  }
}

void check_options(const Generator& generator, const ScheduleOptions& options) {
  const std::string kind = generator.kind;
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
  if (kind == "dualpipev" && options.microbatches < stages) {
    refuse(
        kind, format(
                  "microbatches = {}, but {} ranks need at least twice as "
                  "many: take {} microbatches, or {}",
                  options.microbatches, options.ranks, stages,
                  options.microbatches < 2
                      ? "zb-v, which takes any number"
                      : format("{} ranks", options.microbatches / 2)));
  }
}

}  // namespace

const std::vector<std::string>& schedule_kinds() {
  static const std::vector<std::string> kinds = [] {
    std::vector<std::string> names;
    for (const auto& generator : kGenerators) names.push_back(generator.kind);
    return names;
  }();
  return kinds;
}

int32_t stages_per_rank_of(const std::string& kind) {
  return find(kind).per_rank == PerRank::one ? 1 : 2;
}

Schedule make_schedule(const ScheduleOptions& options) {
  const Generator& generator = find(options.kind);
  ScheduleOptions resolved = options;
  if (resolved.stages_per_rank == 0) {
    resolved.stages_per_rank = stages_per_rank_of(options.kind);
  }
  check_options(generator, resolved);
  return generator.make(
      resolved.ranks, resolved.microbatches, resolved.stages_per_rank);
}

}  // namespace echelon
