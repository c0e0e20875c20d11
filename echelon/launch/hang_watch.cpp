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

void HangWatch::learn(Milliseconds pause) {
  auto& longest =
      num_pauses_ < kFirstPauses ? longest_of_first_ : longest_of_these_;
  longest = std::max(longest, pause);
  if (++num_pauses_ == kFirstRemembered) longest_of_first_ = Milliseconds(0);
  if (num_pauses_ % kRemembered == 0) {
    longest_ = std::exchange(longest_of_these_, Milliseconds(0));
  }
}

std::optional<HangWatch::Hang>
HangWatch::look(const std::vector<RankProgress>& ranks, Milliseconds passed) {
  passed = std::min(passed, kLook);
  if (auto hang = find_stopped(passed)) return hang;
  if (has_progress(ranks)) {
    learn(pause_ + passed);
    pause_ = Milliseconds(0);
    return std::nullopt;
  }
  if (!std::ranges::all_of(ranks, &RankProgress::watched)) {
    pause_ = Milliseconds(0);
    return std::nullopt;
  }
  pause_ += passed;
  const auto longest =
      std::max({longest_of_first_, longest_, longest_of_these_});
  const auto limit = std::max(least_, kTimesTheLongest * longest);
  if (num_pauses_ < kFirstPauses || pause_ < limit) return std::nullopt;
  found_ = true;
  const auto last =
      std::ranges::min_element(ranks, {}, [](const RankProgress& rank) {
        return std::pair(rank.collectives, rank.count);
      });
  std::string text = format(
      "hangs: no rank has made progress in its step for {:.1f} s; the longest "
      "pause before was {:.1f} s",
      seconds(pause_), seconds(longest));
  if (ranks.size() > 1) {
    text += format(
        ". It has issued {} collectives, the other ranks up to {}",
        last->collectives,
        std::ranges::max(ranks, {}, &RankProgress::collectives).collectives);
  }
  return Hang{static_cast<int>(last - ranks.begin()), std::move(text)};
}

}  // namespace echelon::launch
