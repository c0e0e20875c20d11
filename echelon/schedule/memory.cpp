#include "echelon/schedule/memory.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {

StoredActivations stored_activations(const Schedule& schedule) {
  StoredActivations peak;
  peak.stages.resize(schedule.rank_of_stage.size());
  std::vector<int32_t> stored(schedule.rank_of_stage.size());
  for (const auto& list : schedule.ranks) {
    int32_t now = 0;
    int32_t most = 0;
    for (const auto& action : list) {
      const auto stage = static_cast<size_t>(action.stage);
      if (action.kind == ActionKind::forward) {
        most = std::max(most, ++now);
        peak.stages[stage] = std::max(peak.stages[stage], ++stored[stage]);
      } else if (action.kind != ActionKind::backward_input) {
        --now;
        --stored[stage];
      }
    }
    peak.ranks.push_back(most);
  }
  return peak;
}

std::vector<double>
stored_bytes(const Schedule& schedule, const std::vector<StageBytes>& bytes) {
  if (bytes.size() != schedule.rank_of_stage.size()) {
    throw ConfigError(format(
        "stored_bytes: sizes of {}, but the schedule has {}; give one "
        "for each",
        counted(std::ssize(bytes), "stage"), schedule.rank_of_stage.size()));
  }
  std::vector<double> peak;
  for (const auto& list : schedule.ranks) {
    double now = 0;
    double most = 0;
    for (const auto& action : list) {
      const StageBytes& of = bytes[static_cast<size_t>(action.stage)];
      switch (action.kind) {
        case ActionKind::forward:
          now += of.activations;
          break;
        case ActionKind::backward:
          now -= of.activations;
          break;
        case ActionKind::backward_input:
          now -= of.activations - of.for_weights;
          break;
        case ActionKind::backward_weight:
          now -= of.for_weights;
          break;
      }
      most = std::max(most, now);
    }
    peak.push_back(most);
  }
  return peak;
}

}  // namespace echelon
