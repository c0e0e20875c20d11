#include "echelon/schedule/schedule.h"

namespace echelon {

char letter(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return 'F';
    case ActionKind::backward:
      return 'B';
    case ActionKind::backward_input:
      return 'I';
    case ActionKind::backward_weight:
      return 'W';
  }
  return '?';
}

std::string to_string(const Action& action) {
  return std::to_string(action.stage) + letter(action.kind) +
         std::to_string(action.microbatch);
}

std::vector<int32_t> Schedule::stages_of(int32_t rank) const {
  std::vector<int32_t> stages;
  for (int32_t stage = 0; stage < num_stages(); ++stage) {
    if (rank_of_stage[static_cast<size_t>(stage)] == rank) {
      stages.push_back(stage);
    }
  }
  return stages;
}

}  // namespace echelon
