#include "echelon/planner/ranking.h"

#include <algorithm>
#include <limits>

namespace echelon::planner {

bool is_faster(const Candidate& one, const Candidate& other) {
  if (one.step.step_seconds != other.step.step_seconds) {
    return one.step.step_seconds < other.step.step_seconds;
  }
  return one.step.memory.peak_bytes() < other.step.memory.peak_bytes();
}

Ranking::Key Ranking::key_of(const Layout& layout) {
  return {layout.data_degree(), layout.tp, layout.pp, layout.cp, layout.ep};
}

double Ranking::limit_seconds(const Layout& layout) const {
  const auto at = best_.find(key_of(layout));
  if (at != best_.end()) return at->second.step.step_seconds;
  return best_.size() < keep_ ? std::numeric_limits<double>::infinity()
                              : slowest_->second.step.step_seconds;
}

void Ranking::enter(const Candidate& candidate) {
  const auto [at, is_new] =
      best_.try_emplace(key_of(candidate.strategy.layout), candidate);
  if (!is_new && is_faster(candidate, at->second)) at->second = candidate;
  find_slowest();
  if (best_.size() <= keep_) return;
  best_.erase(slowest_);
  find_slowest();
}

std::vector<Candidate> Ranking::sorted() const {
  std::vector<Candidate> all;
  for (const auto& [key, candidate] : best_) all.push_back(candidate);
  std::ranges::sort(all, is_faster);
  return all;
}

void Ranking::find_slowest() {
  slowest_ = std::ranges::max_element(best_, [](const auto& a, const auto& b) {
    return is_faster(a.second, b.second);
  });
}

}  // namespace echelon::planner
