#include "echelon/layout/layout.h"

#include <charconv>
#include <set>
#include <sstream>

#include "echelon/error.h"

namespace echelon {
namespace {

struct Name {
  std::string_view spelled;
  Axis axis;
};

constexpr std::array<Name, 8> kNames = {{
    {"dp", Axis::dp_replicate},
    {"fsdp", Axis::dp_shard},
    {"dp_replicate", Axis::dp_replicate},
    {"dp_shard", Axis::dp_shard},
    {"cp", Axis::cp},
    {"tp", Axis::tp},
    {"pp", Axis::pp},
    {"ep", Axis::ep},
}};

int64_t& degree_of(Layout& layout, Axis axis) {
  switch (axis) {
    case Axis::dp_replicate: return layout.dp_replicate;
    case Axis::dp_shard: return layout.dp_shard;
    case Axis::cp: return layout.cp;
    case Axis::tp: return layout.tp;
    case Axis::pp: return layout.pp;
    case Axis::ep: return layout.ep;
  }
  throw Error("layout: unknown axis");
}

std::string_view short_name(Axis axis) {
  for (const auto& name : kNames) {
    if (name.axis == axis) return name.spelled;
  }
  return "?";
}

}  // namespace

std::string_view to_string(Axis axis) {
  switch (axis) {
    case Axis::dp_replicate: return "dp_replicate";
    case Axis::dp_shard: return "dp_shard";
    case Axis::cp: return "cp";
    case Axis::tp: return "tp";
    case Axis::pp: return "pp";
    case Axis::ep: return "ep";
  }
  return "?";
}

int64_t Layout::degree(Axis axis) const {
  return degree_of(const_cast<Layout&>(*this), axis);
}

int64_t Layout::num_ranks() const {
  int64_t product = 1;
  for (Axis axis : kAxes) {
    if (__builtin_mul_overflow(product, degree(axis), &product)) {
      throw ConfigError(
          "[layout] the product of the degrees overflows; no cluster has so "
          "many ranks");
    }
  }
  return product;
}

Layout parse_layout(std::string_view text) {
  Layout layout;
  std::set<Axis> seen;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? "" : item.substr(equals + 1);
    const Name* found = nullptr;
    for (const auto& name : kNames) {
      if (name.spelled == key) found = &name;
    }
    if (found == nullptr) {
      throw ConfigError(
          "--layout " + std::string(text) + ": \"" + std::string(item) +
          "\" is not AXIS=DEGREE with an axis of dp, fsdp, tp, pp, cp or ep; "
          "write for example dp=2,tp=4");
    }
    int64_t degree = 0;
    const auto [rest, error] =
        std::from_chars(value.data(), value.data() + value.size(), degree);
    if (error != std::errc() || rest != value.data() + value.size() ||
        degree < 1) {
      throw ConfigError(
          "--layout " + std::string(text) + ": " + std::string(key) + "=\"" +
          std::string(value) + "\" must be a whole number, 1 or more");
    }
    if (!seen.insert(found->axis).second) {
      throw ConfigError("--layout " + std::string(text) + ": axis " +
                        std::string(key) + " is given twice");
    }
    degree_of(layout, found->axis) = degree;
  }
  layout.num_ranks();
  return layout;
}

std::string to_string(const Layout& layout) {
  std::string text;
  for (Axis axis : {Axis::dp_replicate, Axis::dp_shard, Axis::pp, Axis::cp,
                    Axis::ep, Axis::tp}) {
    if (layout.degree(axis) == 1) continue;
    if (!text.empty()) text += ",";
    text += std::string(short_name(axis)) + "=" +
            std::to_string(layout.degree(axis));
  }
  return text.empty() ? "dp=1" : text;
}

void check_world_size(const Layout& layout, int64_t world_size) {
  const int64_t product = layout.num_ranks();
  if (product == world_size) return;
  std::ostringstream message;
  message << "[layout] ";
  std::string separator;
  for (Axis axis : kAxes) {
    if (layout.degree(axis) == 1) continue;
    message << separator << short_name(axis) << "=" << layout.degree(axis);
    separator = " * ";
  }
  if (separator.empty()) message << "dp=1";
  message << " = " << product << " ranks, but there are " << world_size;
  std::string fits;  // with the other degrees as they are
  for (Axis axis : kAxes) {
    const int64_t degree = layout.degree(axis);
    if (axis != Axis::dp_replicate && degree == 1) continue;
    const int64_t others = product / degree;
    if (others > world_size || world_size % others != 0) continue;
    fits += (fits.empty() ? "" : " or ") + std::string(short_name(axis)) + "=" +
            std::to_string(world_size / others);
  }
  if (!fits.empty()) {
    message << "; " << fits << " fits, or start " << product << " ranks";
  } else {
    message << "; start " << product << " ranks (-n " << product << ")";
  }
  throw ConfigError(message.str());
}

}  // namespace echelon
