#include "echelon/launch/hang_watch.h"

#include <algorithm>
#include <utility>

#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

// The first steps are slow, and say little of the others. Until there are some
// others, nothing else is known.
constexpr int64_t kFirstPauses = 8;
constexpr int64_t kFirstRemembered = 64;
constexpr int64_t kRemembered = 1000;
constexpr int kTimesTheLongest = 10;

double seconds(HangWatch::Milliseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

}  // namespace

HangWatch::HangWatch(int num_ranks, Milliseconds least)
    : least_(least),
      stopped_(static_cast<size_t>(num_ranks)),
      counts_(static_cast<size_t>(num_ranks)) {}

void HangWatch::on_stopped(int rank, const std::string& signal) {
  stopped_[static_cast<size_t>(rank)] = {signal, Milliseconds(0)};
}

void HangWatch::on_continued(int rank) {
  stopped_[static_cast<size_t>(rank)] = {};
}

std::optional<HangWatch::Hang> HangWatch::find_stopped(Milliseconds passed) {
  for (size_t i = 0; i < stopped_.size(); ++i) {
    auto& [signal, time] = stopped_[i];
    if (signal.empty()) continue;
    time += passed;
    if (time >= kStopped) {
      return Hang{
          static_cast<int>(i),
          format(
              "was stopped by {} and not continued for {:g} s", signal,
              seconds(kStopped))};
    }
  }
  return std::nullopt;
}

bool HangWatch::has_progress(const std::vector<RankProgress>& ranks) {
  bool progress = false;
  for (size_t i = 0; i < ranks.size(); ++i) {
    progress |= ranks[i].count != counts_[i];
    counts_[i] = ranks[i].count;
  }
  return progress;
}

void HangWatch::Pauses::learn(Milliseconds pause) {
  auto& longest = number < kFirstPauses ? of_first : since;
  longest = std::max(longest, pause);
  if (++number == kFirstRemembered) of_first = Milliseconds(0);
  if (number % kRemembered == 0) {
    before = std::exchange(since, Milliseconds(0));
  }
}

HangWatch::Milliseconds HangWatch::Pauses::longest() const {
  return std::max({of_first, before, since});
}

HangWatch::Pauses& HangWatch::pauses_of(RankPhase phase) {
  return pauses_[phase == RankPhase::evaluation ? 1 : 0];
}

std::optional<HangWatch::Hang>
HangWatch::look(const std::vector<RankProgress>& ranks, Milliseconds passed) {
  passed = std::min(passed, kLook);
  if (auto hang = find_stopped(passed)) return hang;
  // Some may be in another phase already.
  const auto in = [&](RankPhase phase) {
    return std::ranges::any_of(
        ranks, [&](const auto& rank) { return rank.phase == phase; });
  };
  if (has_progress(ranks)) {
    for (const auto phase : {RankPhase::step, RankPhase::evaluation}) {
      if (pauses_of(phase).now || in(phase)) {
        pauses_of(phase).learn(
            passed + (pauses_of(phase).now ? pause_ : Milliseconds(0)));
      }
      pauses_of(phase).now = in(phase);
    }
    pause_ = Milliseconds(0);
    return std::nullopt;
  }
  if (in(RankPhase::other)) {
    pause_ = Milliseconds(0);
    return std::nullopt;
  }
  pause_ += passed;
  auto longest = Milliseconds(0);
  bool is_known = true;
  for (const auto phase : {RankPhase::step, RankPhase::evaluation}) {
    pauses_of(phase).now = in(phase);
    if (!in(phase)) continue;
    longest = std::max(longest, pauses_of(phase).longest());
    is_known = is_known && pauses_of(phase).number >= kFirstPauses;
  }
  const auto limit = std::max(least_, kTimesTheLongest * longest);
  if (!is_known || pause_ < limit) return std::nullopt;
  const auto last =
      std::ranges::min_element(ranks, {}, [](const RankProgress& rank) {
        return std::pair(rank.collectives, rank.count);
      });
  std::string text = format(
      "hangs: no rank has made progress in its {} for {:.1f} s; the longest "
      "pause before was {:.1f} s",
      in(RankPhase::step) ? "step" : "evaluation", seconds(pause_),
      seconds(longest));
  if (ranks.size() > 1) {
    text += format(
        ". It has issued {} collectives, the other ranks up to {}",
        last->collectives,
        std::ranges::max(ranks, {}, &RankProgress::collectives).collectives);
  }
  return Hang{
      static_cast<int>(last - ranks.begin()), std::move(text),
      static_cast<int64_t>(last->collectives)};
}

}  // namespace echelon::launch
