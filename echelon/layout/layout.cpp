#include "echelon/layout/layout.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/units.h"

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
  constexpr std::array kDegrees = {&Layout::dp_replicate, &Layout::dp_shard,
                                   &Layout::pp,           &Layout::cp,
                                   &Layout::ep,           &Layout::tp};
  return layout.*kDegrees.at(static_cast<size_t>(axis));
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

// The axes of degree above 1, in the given order.
std::vector<Axis> used_in(const Layout& layout, const AxisOrder& order) {
  std::vector<Axis> used(order.begin(), order.end());
  std::erase_if(used, [&](Axis axis) { return layout.degree(axis) == 1; });
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

std::string_view short_axis_name(std::string_view axis) {
  for (const Axis one : kAxes) {
    if (axis == to_string(one)) return short_name(one);
  }
  return axis;
}

std::string_view to_string(Axis axis) {
  constexpr std::array<std::string_view, 6> kAxisNames = {
      "dp_replicate", "dp_shard", "pp", "cp", "ep", "tp"};
  return kAxisNames.at(static_cast<size_t>(axis));
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
  return std::ranges::all_of(
      kAxes, [&](Axis axis) { return degree(axis) == other.degree(axis); });
}

bool Layout::operator==(const Layout& other) const {
  return same_degrees(other) && used_axes() == other.used_axes();
}

std::string set_order(Layout& layout, const std::vector<std::string>& names) {
  std::vector<Axis> named;
  for (const auto& spelled : names) {
    const Name* found = find_name(spelled);
    if (found == nullptr) {
      return format(
          "\"{}\" is not an axis: dp, fsdp, pp, cp, ep or tp{}", spelled,
          config::did_you_mean(spelled, names_of_axes()));
    }
    if (std::ranges::find(named, found->axis) != named.end()) {
      return format(
          "names the axis {} twice; each is at one place",
          short_name(found->axis));
    }
    named.push_back(found->axis);
  }
  AxisOrder order{};
  auto at = order.begin();
  for (const Axis axis : kAxes) {
    if (std::ranges::find(named, axis) != named.end()) continue;
    if (layout.degree(axis) > 1) {
      return format(
          "leaves out {}, which has {} ranks; name every axis that has "
          "several, outermost first",
          short_name(axis), layout.degree(axis));
    }
    *at++ = axis;
  }
  std::copy(named.begin(), named.end(), at);
  layout.order = order;
  return "";
}

Layout parse_layout(std::string_view text) {
  const auto fail = [&](const std::string& rule) {
    throw ConfigError(format("--layout {}: {}", text, rule));
  };
  Layout layout;
  std::set<Axis> seen;
  std::optional<std::string> order;
  std::string unspaced(text);
  std::erase(unspaced, ' ');
  for (const std::string& item : split(unspaced, ',')) {
    const size_t equals = item.find('=');
    const std::string key = item.substr(0, equals);
    const std::string value =
        equals == std::string::npos ? "" : item.substr(equals + 1);
    if (key == "order") {
      if (order) fail("order is given twice");
      order = value;
      continue;
    }
    const Name* found = find_name(key);
    if (found == nullptr) {
      const std::string near =
          equals == item.npos ? "" : config::did_you_mean(key, names_of_axes());
      fail(format(
          "\"{}\" is not AXIS=DEGREE with an axis of dp, fsdp, tp, pp, cp or "
          "ep{}",
          item, near.empty() ? "; write for example dp=2,tp=4" : near));
    }
    int64_t degree = 0;
    const char* const end = value.data() + value.size();
    const auto [rest, error] = std::from_chars(value.data(), end, degree);
    if (error != std::errc() || rest != end || degree < 1) {
      fail(format("{}=\"{}\" must be a whole number, 1 or more", key, value));
    }
    if (!seen.insert(found->axis).second) {
      fail(format("axis {} is given twice", key));
    }
    degree_of(layout, found->axis) = degree;
  }
  layout.num_ranks();
  if (!order) return layout;
  if (const auto rule = set_order(layout, split(*order, ':')); !rule.empty()) {
    const bool other = order->find_first_of("-/;>. ") != std::string::npos;
    fail(format(
        "order={}: {}{}", *order, rule,
        other ? "; axes are separated by colons, as in order=pp:dp:tp" : ""));
  }
  return layout;
}

std::string to_string(const Layout& layout) {
  const auto usual = used_in(layout, kAxes);
  std::string text;
  for (const Axis axis : usual) {
    if (!text.empty()) text += ",";
    text += format("{}={}", short_name(axis), layout.degree(axis));
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
  std::string degrees;
  std::string fits;  // with the other degrees as they are
  for (Axis axis : kAxes) {
    const int64_t degree = layout.degree(axis);
    if (degree > 1) {
      degrees += format(
          "{}{}={}", degrees.empty() ? "" : " * ", short_name(axis), degree);
    } else if (axis != Axis::dp_replicate) {
      continue;
    }
    const int64_t others = product / degree;
    if (others > world_size || world_size % others != 0) continue;
    fits += format(
        "{}{}={}", fits.empty() ? "" : " or ", short_name(axis),
        world_size / others);
  }
  throw ConfigError(format(
      "[layout] {} = {}, but there are {}; {}",
      degrees.empty() ? "dp=1" : degrees, counted(product, "rank"), world_size,
      fits.empty()
          ? format("start {} (-n {})", counted(product, "rank"), product)
          : format("{} fits, or start {}", fits, counted(product, "rank"))));
}

}  // namespace echelon
