#include "echelon/cost/pass_times.h"

#include <algorithm>

namespace echelon {
namespace {

bool alike(const GroupPlace& one, const GroupPlace& other) {
  return one.ranks == other.ranks &&
         one.ranks_per_node == other.ranks_per_node &&
         one.nodes == other.nodes && one.sharing == other.sharing &&
         one.across_racks == other.across_racks;
}

}  // namespace

const PassSeconds& PassTimes::of(
    const LayerWork& layer, int64_t rank, Operations LayerWork::*pass) {
  static const PassSeconds kNothing;
  if ((layer.*pass).empty()) return kNothing;
  const size_t here = place(rank);
  for (const Entry& entry : entries_) {
    if (entry.kind == layer.kind && entry.pass == pass && entry.place == here) {
      return entry.seconds;
    }
  }
  const PassSeconds seconds = pass_seconds(
      layer.*pass, context_.strategy, context_.cluster, context_.stack, rank);
  entries_.push_back({layer.kind, pass, here, seconds});
  return entries_.back().seconds;
}

PassSeconds
PassTimes::of(const Layers& layers, int64_t rank, Operations LayerWork::*pass) {
  PassSeconds sum;
  for (const LayerWork* layer : layers) {
    sum.add(static_cast<double>(layer->repeat), of(*layer, rank, pass));
  }
  return sum;
}

size_t PassTimes::place(int64_t rank) {
  const bool alike_all = !context_.cluster.mixed() && !places_.empty();
  if (rank == last_rank_ || alike_all) return last_place_;
  Place here{.node = &context_.cluster.node_of(rank), .groups = {}};
  size_t number = 0;
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep}) {
    here.groups[number++] =
        place_of(context_.strategy, context_.cluster, axis, rank);
  }
  const auto same = [&](const Place& other) {
    return other.node == here.node &&
           std::equal(
               here.groups.begin(), here.groups.end(), other.groups.begin(),
               alike);
  };
  const auto at = std::find_if(places_.begin(), places_.end(), same);
  last_rank_ = rank;
  last_place_ = static_cast<size_t>(at - places_.begin());
  if (at == places_.end()) places_.push_back(here);
  return last_place_;
}

}  // namespace echelon
