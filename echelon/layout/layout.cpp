#include "echelon/layout/layout.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <sstream>

#include "echelon/error.h"
#include "echelon/text/nearest.h"

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
    case Axis::dp_replicate:
      return layout.dp_replicate;
    case Axis::dp_shard:
      return layout.dp_shard;
    case Axis::cp:
      return layout.cp;
    case Axis::tp:
      return layout.tp;
    case Axis::pp:
      return layout.pp;
    case Axis::ep:
      return layout.ep;
  }
  throw Error("layout: unknown axis");
}

const Name* find_name(std::string_view spelled) {
  for (const auto& name : kNames) {
    if (name.spelled == spelled) return &name;
  }
  return nullptr;
}

std::vector<std::string> names_of_axes() {
  std::vector<std::string> names;
  for (const auto& name : kNames) names.emplace_back(name.spelled);
  return names;
}

// The axes of degree above 1 in any order.
std::vector<Axis> used_in(const Layout& layout, const AxisOrder& order) {
  std::vector<Axis> used;
  for (const Axis axis : order) {
    if (layout.degree(axis) > 1) used.push_back(axis);
  }
  return used;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

std::string_view short_name(Axis axis) {
  for (const auto& name : kNames) {
    if (name.axis == axis) return name.spelled;
  }
  return "?";
}

std::string_view to_string(Axis axis) {
  switch (axis) {
    case Axis::dp_replicate:
      return "dp_replicate";
    case Axis::dp_shard:
      return "dp_shard";
    case Axis::cp:
      return "cp";
    case Axis::tp:
      return "tp";
    case Axis::pp:
      return "pp";
    case Axis::ep:
      return "ep";
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

int64_t Layout::stride(Axis axis) const {
  int64_t stride = 1;
  for (auto inner = order.rbegin(); inner != order.rend() && *inner != axis;
       ++inner) {
    stride *= degree(*inner);
  }
  return stride;
}

std::vector<Axis> Layout::used_axes() const {
  return used_in(*this, order);
}

bool Layout::same_degrees(const Layout& other) const {
  return std::all_of(kAxes.begin(), kAxes.end(), [&](Axis axis) {
    return degree(axis) == other.degree(axis);
  });
}

bool Layout::operator==(const Layout& other) const {
  return same_degrees(other) && used_axes() == other.used_axes();
}

std::string set_order(Layout& layout, const std::vector<std::string>& names) {
  std::vector<Axis> named;
  for (const auto& spelled : names) {
    const Name* found = find_name(spelled);
    if (found == nullptr) {
      return "\"" + spelled + "\" is not an axis: dp, fsdp, pp, cp, ep or tp" +
             config::did_you_mean(spelled, names_of_axes());
    }
    if (std::find(named.begin(), named.end(), found->axis) != named.end()) {
      return "names the axis " + std::string(short_name(found->axis)) +
             " twice; each is at one place";
    }
    named.push_back(found->axis);
  }
  AxisOrder order{};
  auto at = order.begin();
  for (const Axis axis : kAxes) {
    if (std::find(named.begin(), named.end(), axis) != named.end()) continue;
    if (layout.degree(axis) > 1) {
      return "leaves out " + std::string(short_name(axis)) + ", which has " +
             std::to_string(layout.degree(axis)) +
             " ranks; name every axis that has several, outermost first";
    }
    *at++ = axis;
  }
  std::copy(named.begin(), named.end(), at);
  layout.order = order;
  return "";
}

Layout parse_layout(std::string_view text) {
  Layout layout;
  std::set<Axis> seen;
  std::optional<std::string> order;
  for (const std::string& item : split(text, ',')) {
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals);
    const std::string value =
        equals == std::string::npos ? "" : item.substr(equals + 1);
    if (key == "order") {
      if (order) {
        throw ConfigError(
            "--layout " + std::string(text) + ": order is given twice");
      }
      order = value;
      continue;
    }
    const Name* found = find_name(key);
    if (found == nullptr) {
      throw ConfigError(
          "--layout " + std::string(text) + ": \"" + item +
          "\" is not AXIS=DEGREE with an axis of dp, fsdp, tp, pp, cp or ep; "
          "write for example dp=2,tp=4");
    }
    int64_t degree = 0;
    const auto [rest, error] =
        std::from_chars(value.data(), value.data() + value.size(), degree);
    if (error != std::errc() || rest != value.data() + value.size() ||
        degree < 1) {
      throw ConfigError(
          "--layout " + std::string(text) + ": " + key + "=\"" + value +
          "\" must be a whole number, 1 or more");
    }
    if (!seen.insert(found->axis).second) {
      throw ConfigError(
          "--layout " + std::string(text) + ": axis " + key +
          " is given twice");
    }
    degree_of(layout, found->axis) = degree;
  }
  layout.num_ranks();
  if (!order) return layout;
  if (const auto rule = set_order(layout, split(*order, ':')); !rule.empty()) {
    const bool other = order->find_first_of("-/;>. ") != std::string::npos;
    throw ConfigError(
        "--layout " + std::string(text) + ": order=" + *order + ": " + rule +
        (other ? "; axes are separated by colons, as in order=pp:dp:tp" : ""));
  }
  return layout;
}

std::string to_string(const Layout& layout) {
  const auto usual = used_in(layout, kAxes);
  std::string text;
  for (const Axis axis : usual) {
    if (!text.empty()) text += ",";
    text += std::string(short_name(axis)) + "=" +
            std::to_string(layout.degree(axis));
  }
  const auto used = layout.used_axes();
  for (size_t i = 0; used != usual && i < used.size(); ++i) {
    text += (i == 0 ? ",order=" : ":") + std::string(short_name(used[i]));
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
