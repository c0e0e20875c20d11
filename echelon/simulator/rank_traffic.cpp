#include "echelon/simulator/rank_traffic.h"

#include <algorithm>
#include <cmath>

#include "echelon/cost/activation_bytes.h"
#include "echelon/cost/collective_time.h"
#include "echelon/simulator/traffic_axes.h"

namespace echelon::simulator {
Elements elements_of(const LayerWork& layer) {
  return {layer.parameters - layer.expert_parameters, layer.expert_parameters};
}

RankTraffic::RankTraffic(
    const Strategy& strategy, const Cluster& cluster, const Stack& stack,
    const std::vector<AxisMask>& axes, int64_t rank)
    : strategy_(strategy),
      cluster_(cluster),
      stack_(stack),
      axes_(axes),
      rank_(rank) {}

int32_t RankTraffic::label(const std::string& text) {
  const auto at = std::find(labels_.begin(), labels_.end(), text);
  const auto number = static_cast<int32_t>(at - labels_.begin());
  if (at == labels_.end()) labels_.push_back(text);
  return number;
}

Instructions RankTraffic::collective(
    CollectiveKind kind, AxisMask axes, double bytes, const std::string& name) {
  const auto at = std::find(axes_.begin(), axes_.end(), axes);
  if (axes == 0 || at == axes_.end() || bytes <= 0) return {};
  Instruction one{.kind = Instruction::Kind::collective, .collective = kind};
  one.group = static_cast<int16_t>(at - axes_.begin());
  one.bytes = bytes;
  one.label = label(name);
  one.collective_seconds = collective_seconds(
      kind, bytes, place_of(strategy_, cluster_, axes_of(axes), rank_),
      cluster_.node_of(rank_), cluster_, stack_);
  return {one};
}

Instructions
RankTraffic::gathers(const Elements& elements, const std::string& name) {
  Instructions list;
  for (const bool experts : {false, true}) {
    const double bytes = (experts ? elements.experts : elements.dense) *
                         element_bytes(strategy_.precision);
    append(
        list,
        collective(
            CollectiveKind::all_gather, sharing_of(strategy_, experts).shards,
            bytes, "gather " + name + (experts ? " experts" : "")));
  }
  return list;
}

Instructions
RankTraffic::reductions(const Elements& elements, const std::string& name) {
  Instructions list;
  for (const bool experts : {false, true}) {
    const double bytes =
        (experts ? elements.experts : elements.dense) * stack_.gradient_bytes;
    if (bytes <= 0) continue;
    append(
        list,
        reductions_of(bytes, experts, name + (experts ? " experts" : "")));
  }
  return list;
}

Instructions RankTraffic::reductions_of(
    double bytes, bool experts, const std::string& name) {
  const Sharing sharing = sharing_of(strategy_, experts);
  const double shards = static_cast<double>(std::max<int64_t>(
      1, place_of(strategy_, cluster_, axes_of(sharing.shards), rank_).ranks));
  const std::string copies = sharing.shards
                                 ? "replicate " + name
                                 : "bucket " + std::to_string(next_bucket_++);
  Instructions list = collective(
      CollectiveKind::reduce_scatter, sharing.shards, bytes, "reduce " + name);
  append(
      list,
      collective(
          CollectiveKind::all_reduce, sharing.copies, bytes / shards, copies));
  return list;
}

}  // namespace echelon::simulator
