#include "echelon/explain/late_ranks.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "echelon/layout/mesh.h"

namespace echelon {
namespace {

bool is_collective(const Span& span) {
  return span.kind == SpanKind::communication && span.step >= 0 &&
         !span.axis.empty() && span.axis != "pp" && span.track != "compute";
}

// The first rank of the group that a collective of `rank` is called in.
class Groups {
 public:
  Groups(const Timeline& timeline, const std::optional<Layout>& layout) {
    std::set<std::string> axes;
    int32_t most = -1;
    for (const Span& span : timeline.spans) {
      most = std::max(most, span.rank);
      if (is_collective(span) && span.axis != "world") axes.insert(span.axis);
    }
    known_ = layout ? most < layout->num_ranks() : axes.size() < 2;
    if (known_ && layout) mesh_.emplace(*layout);
  }

  bool known() const { return known_; }

  int first_of(int32_t rank, const std::string& axis) {
    if (!mesh_ || axis == "world") return 0;
    const auto [at, is_new] = found_.try_emplace({rank, axis}, 0);
    if (is_new) at->second = ranks_along(rank, axis).front();
    return at->second;
  }

 private:
  std::vector<int> ranks_along(int32_t rank, const std::string& axis) const {
    for (const Axis one : kAxes) {
      if (to_string(one) == axis) return mesh_->ranks_along(rank, one);
    }
    // "data": all ranks with other samples.
    return mesh_->ranks_along(
        rank, std::vector<Axis>{Axis::dp_replicate, Axis::dp_shard});
  }

  bool known_ = false;
  std::optional<Mesh> mesh_;
  std::map<std::pair<int32_t, std::string>, int> found_;
};

// step, axis, group, name, how often before
using Key = std::tuple<int64_t, std::string, int, std::string, int>;

std::map<Key, std::vector<const Span*>>
calls_of(const Timeline& timeline, Groups& groups) {
  std::vector<const Span*> spans;
  for (const Span& span : timeline.spans) {
    if (is_collective(span)) spans.push_back(&span);
  }
  std::stable_sort(
      spans.begin(), spans.end(),
      [](const Span* a, const Span* b) { return a->begin_ns < b->begin_ns; });
  std::map<std::tuple<int32_t, int64_t, std::string, std::string>, int> counts;
  std::map<Key, std::vector<const Span*>> calls;
  for (const Span* span : spans) {
    const int count =
        counts[{span->rank, span->step, span->axis, span->name}]++;
    const int group = groups.first_of(span->rank, span->axis);
    calls[{span->step, span->axis, group, span->name, count}].push_back(span);
  }
  return calls;
}

}  // namespace

LateRanks
late_ranks(const Timeline& timeline, const std::optional<Layout>& layout) {
  Groups groups(timeline, layout);
  if (!groups.known()) return {};
  std::map<RankStep, std::vector<Interval>> waits, caused;
  for (const auto& [key, spans] : calls_of(timeline, groups)) {
    const Span* last = *std::max_element(
        spans.begin(), spans.end(),
        [](const Span* a, const Span* b) { return a->begin_ns < b->begin_ns; });
    for (const Span* span : spans) {
      const Interval wait = {
          span->begin_ns, std::min(span->end_ns, last->begin_ns)};
      if (wait.begin >= wait.end) continue;
      waits[{span->rank, span->step}].push_back(wait);
      caused[{last->rank, span->step}].push_back(wait);
    }
  }
  LateRanks result;
  for (auto& [place, list] : waits)
    result.waits[place] = merged(std::move(list));
  for (auto& [place, list] : caused) {
    result.caused[place] = merged(std::move(list));
  }
  return result;
}

}  // namespace echelon
