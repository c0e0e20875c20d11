#include "echelon/pool/fair_share.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

namespace echelon::pool {
namespace {

class Sharing {
 public:
  Sharing(const State& state, std::vector<int64_t> requested)
      : state_(state),
        requested_(std::move(requested)),
        guaranteed_(state.projects.size()),
        fair_(state.projects.size()) {
    for (size_t p = 0; p < guaranteed_.size(); ++p) {
      guaranteed_[p] = state.projects[p].guaranteed;
    }
  }

  std::vector<int64_t> run() {
    std::vector<size_t> top;
    const auto& projects = state_.projects;
    for (size_t p = 0; p < projects.size(); ++p) {
      if (projects[p].parent < 0) top.push_back(p);
    }
    for (const size_t parent : top) {
      const auto children = children_of(parent);
      if (children.empty()) continue;
      int64_t asked = 0, guaranteed = 0;
      for (const size_t child : children) {
        asked += requested_[child];
        guaranteed += guaranteed_[child];
      }
      requested_[parent] = std::min(asked, projects[parent].limit);
      guaranteed_[parent] = std::max(guaranteed_[parent], guaranteed);
    }
    divide(std::ranges::count_if(state_.devices, &Device::usable), top);
    for (const size_t parent : top) {
      if (const auto children = children_of(parent); !children.empty()) {
        divide(fair_[parent], children);
      }
    }
    return fair_;
  }

 private:
  std::vector<size_t> children_of(size_t parent) const {
    std::vector<size_t> children;
    for (size_t p = 0; p < state_.projects.size(); ++p) {
      if (state_.projects[p].parent == static_cast<int>(parent)) {
        children.push_back(p);
      }
    }
    return children;
  }

  void divide(int64_t devices, const std::vector<size_t>& members) {
    std::vector<double> weights;
    for (const size_t p : members) {
      weights.push_back(static_cast<double>(guaranteed_[p]));
    }
    // More can be guaranteed than there is only while devices are drained.
    devices -= fill(devices, members, weights, [&](size_t p) {
      return std::min(guaranteed_[p], requested_[p]);
    });
    fill(devices, members, weights_of(members), [&](size_t p) {
      return requested_[p];
    });
  }

  // The formula of KAI's time-based fair share: a project that used more than
  // its weight lately gets less.
  std::vector<double> weights_of(const std::vector<size_t>& members) const {
    double weight = 0, usage = 0;
    for (const size_t p : members) {
      weight += state_.projects[p].weight;
      usage += state_.projects[p].usage;
    }
    std::vector<double> weights;
    for (const size_t p : members) {
      const Project& project = state_.projects[p];
      double own = project.weight;
      if (state_.rules.usage_factor > 0 && usage > 0 && weight > 0) {
        own /= weight;
        const double used = project.usage / usage;
        // Never nothing: who only waits would not know when it is enough.
        own =
            std::max(own / 100, own + state_.rules.usage_factor * (own - used));
      }
      weights.push_back(own);
    }
    return weights;
  }

  // Adds devices to fair_, at most up to wanted(project); returns how many.
  template <class Wanted>
  int64_t fill(
      int64_t devices, const std::vector<size_t>& members,
      const std::vector<double>& weights, const Wanted& wanted) {
    using Next = std::pair<double, size_t>;  // the smallest is served next
    std::priority_queue<Next, std::vector<Next>, std::greater<>> queue;
    std::vector<int64_t> given(members.size());
    const auto ask = [&](size_t i) {
      if (weights[i] > 0 && fair_[members[i]] < wanted(members[i])) {
        queue.emplace(static_cast<double>(given[i] + 1) / weights[i], i);
      }
    };
    for (size_t i = 0; i < members.size(); ++i) ask(i);
    int64_t left = devices;
    for (; left > 0 && !queue.empty(); --left) {
      const size_t i = queue.top().second;
      queue.pop();
      ++given[i];
      ++fair_[members[i]];
      ask(i);
    }
    return devices - left;
  }

  const State& state_;
  std::vector<int64_t> requested_;
  std::vector<int64_t> guaranteed_;
  std::vector<int64_t> fair_;
};

}  // namespace

std::vector<int64_t>
fair_shares(const State& state, std::vector<int64_t> requested) {
  return Sharing(state, std::move(requested)).run();
}

}  // namespace echelon::pool
