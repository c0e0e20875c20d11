#include "echelon/options/layout.h"

#include "echelon/config/section.h"

namespace echelon {
namespace {

constexpr int64_t kLargestDegree = 1 << 20;

void bind_order(config::Section& section, Layout& layout) {
  std::vector<std::string> names = order_names(layout.order);
  section
      .field(
          "order", names,
          "of the axes, outermost first: ranks that differ in the last one "
          "alone "
          "are neighbours; axes of degree 1 may be left out")
      .rule([&] { return set_order(layout, names); });
}

}  // namespace

const std::vector<std::string>& degree_keys() {
  static const std::vector<std::string> keys = {
      "dp", "dp_replicate", "fsdp", "dp_shard", "tp", "pp", "cp", "ep"};
  return keys;
}

void bind(config::Section& section, Layout& layout) {
  section
      .field(
          "dp", layout.dp_replicate,
          "copies of the model, each with its own samples")
      .also("dp_replicate")
      .at_least(1)
      .at_most(kLargestDegree);
  section
      .field(
          "fsdp", layout.dp_shard,
          "ranks that share out the parameters, each with its own samples")
      .also("dp_shard")
      .at_least(1)
      .at_most(kLargestDegree);
  section.field("tp", layout.tp, "ranks that share each layer's matrices")
      .at_least(1)
      .at_most(kLargestDegree);
  section.field("pp", layout.pp, "ranks that share out the list of layers")
      .at_least(1)
      .at_most(kLargestDegree);
  section.field("cp", layout.cp, "ranks that share the sequence")
      .at_least(1)
      .at_most(kLargestDegree);
  section.field("ep", layout.ep, "ranks that share the experts")
      .at_least(1)
      .at_most(kLargestDegree);
  bind_order(section, layout);
}

std::vector<std::string> order_names(const AxisOrder& order) {
  std::vector<std::string> names;
  for (const Axis axis : order) names.emplace_back(short_name(axis));
  return names;
}

}  // namespace echelon
