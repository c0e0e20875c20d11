// What a rank launched beside its computing: on each stream one after the
// other, and who waits for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

class Background {
 public:
  explicit Background(int16_t num_tags)
      : tags_(static_cast<size_t>(num_tags)) {}

  /// True: it is the only one of its stream, and may begin.
  bool launch(const Instruction& instruction, double now);

  /// The oldest of `stream` that has not ended, and when it may begin.
  struct Oldest {
    const Instruction* instruction = nullptr;  // null: there is none
    double time = 0;
  };
  Oldest oldest(size_t stream) const;

  /// That one ran from `start` to `end`.
  const Instruction& finish_oldest(size_t stream, double start, double end);

  /// Whether everything that `wait` (or wait_all) is for has ended.
  bool over(const Instruction& wait) const;

  /// What `wait` was for: the last of it to end, and the seconds that all of it
  /// took since somebody waited for it.
  struct Ended {
    const Instruction* last = nullptr;  // null: nothing was launched
    double end = 0;
    double seconds = 0;
  };
  Ended take(const Instruction& wait);

 private:
  struct Posted {
    const Instruction* instruction;
    double time;
  };
  struct Tag {
    const Instruction* instruction = nullptr;  // its last launch
    size_t on_their_way = 0;
    double end = 0;  // of the last that ended
    double seconds =
        0;  // that its launches took since somebody waited for them
  };

  Tag& tag_of(const Instruction& instruction) {
    return tags_[static_cast<size_t>(instruction.tag)];
  }

  std::vector<Tag> tags_;
  std::array<std::deque<Posted>, kNumStreams> posted_;
  std::array<double, kNumStreams> free_{};
  size_t on_their_way_ = 0;
};

}  // namespace echelon::simulator
