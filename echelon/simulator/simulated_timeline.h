// What simulated ranks did, as a timeline like a real run's: the same tracks,
// names and kinds.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/simulator/simulated_job.h"
#include "echelon/timeline/timeline.h"

namespace echelon::simulator {

/// Records the spans of some ranks; a class that has several of them is
/// recorded once, for each of them.
class SpanCollector final : public StepObserver {
 public:
  SpanCollector(
      const ModelJob& job, const Layout& layout, std::vector<int64_t> ranks);

  /// Spans from here on belong to `step`, which begins `seconds` after the
  /// first.
  void begin_step(int64_t step, double seconds);

  bool wants(int32_t rank_class) const override;
  void action(
      int32_t rank_class, const Action& action, double begin,
      double end) override;
  void optimizer(int32_t rank_class, double begin, double end) override;
  void collective(
      int32_t rank_class, const Instruction& instruction, double begin,
      double end, bool stood_still) override;
  void wait_for(
      int32_t rank_class, const Instruction& launched, double begin,
      double end) override;
  void message(
      int32_t from, int32_t to, const Action& producer, double bytes,
      double begin, double end) override;
  void wait_for_message(
      int32_t rank_class, const Action& producer, double begin,
      double end) override;

  /// All spans; ranks are numbered as in the job, named by their devices.
  Timeline take(const std::string& title, const Cluster& cluster);

 private:
  void add(int32_t rank_class, Span span, double begin, double end);
  std::string name_of(int32_t rank_class, const Instruction& instruction) const;

  const ModelJob& job_;
  Layout layout_;
  std::vector<int64_t> ranks_;
  std::vector<std::vector<int64_t>> ranks_of_class_;
  int64_t step_ = 0;
  double begin_ = 0;
  std::vector<Span> spans_;
};

/// The ranks that say most, at most `most`, ascending: a whole pipeline, the
/// first stragglers, then the first ranks.
std::vector<int64_t> ranks_to_show(const ModelJob& job, int64_t most);

}  // namespace echelon::simulator
