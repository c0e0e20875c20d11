#include "echelon/simulator/background.h"

#include <algorithm>

namespace echelon::simulator {

bool Background::launch(const Instruction& instruction, double now) {
  auto& posted = posted_[static_cast<size_t>(instruction.stream)];
  Tag& tag = tag_of(instruction);
  tag.instruction = &instruction;
  ++tag.on_their_way;
  ++on_their_way_;
  posted.push_back({&instruction, now});
  return posted.size() == 1;
}

Background::Oldest Background::oldest(size_t stream) const {
  if (posted_[stream].empty()) return {};
  const Posted& posted = posted_[stream].front();
  return {posted.instruction, std::max(posted.time, free_[stream])};
}

const Instruction&
Background::finish_oldest(size_t stream, double start, double end) {
  const Instruction& instruction = *posted_[stream].front().instruction;
  posted_[stream].pop_front();
  free_[stream] = end;
  --on_their_way_;
  Tag& tag = tag_of(instruction);
  --tag.on_their_way;
  tag.end = end;
  tag.seconds += end - start;
  return instruction;
}

bool Background::over(const Instruction& wait) const {
  if (wait.kind == Instruction::Kind::wait_all) return on_their_way_ == 0;
  return tags_[static_cast<size_t>(wait.tag)].on_their_way == 0;
}

Background::Ended Background::take(const Instruction& wait) {
  Ended ended;
  const auto look_at = [&](Tag& tag) {
    if (!tag.instruction) return;
    ended.seconds += tag.seconds;
    tag.seconds = 0;
    if (ended.last && tag.end <= ended.end) return;
    ended.last = tag.instruction;
    ended.end = tag.end;
  };
  if (wait.kind == Instruction::Kind::wait_all) {
    for (Tag& tag : tags_) look_at(tag);
  } else {
    look_at(tag_of(wait));
  }
  return ended;
}

}  // namespace echelon::simulator
