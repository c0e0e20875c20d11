// Both balances search for the smallest bound that some partition keeps. Each
// probe halves the interval of bounds and asks which boundaries can be
// completed to a partition. Among the partitions that keep the final bound, a
// walk from the front takes the one whose slices stay nearest to the mean of
// what remains.
#include "echelon/layout/partition.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kPrecision = 1e-12;  // of a bound: what sums of doubles keep
constexpr size_t kSlicesInMessage = 8;

template <class T>
std::vector<double> running_sums(const std::vector<T>& values) {
  std::vector<double> sums{0.0};
  for (const T& value : values) {
    sums.push_back(sums.back() + static_cast<double>(value));
  }
  return sums;
}

void check_counts(size_t layers, size_t slices) {
  if (slices == 0) {
    throw ConfigError("a model is partitioned into 0 slices; 1 is the least");
  }
  if (slices > layers) {
    throw ConfigError(format(
        "a model of {} is partitioned into {}, but each slice needs a layer; "
        "use {}, or define the model in finer layers",
        counted(layers, "layer"), counted(slices, "slice"),
        layers == 0 ? "a model that has layers"
                    : format("{} or fewer slices", layers)));
  }
}

void check_speeds(const std::vector<double>& speeds, size_t slices) {
  if (!speeds.empty() && speeds.size() != slices) {
    throw ConfigError(format(
        "{} for {}; give one for each, or none",
        counted(speeds.size(), "speed"), counted(slices, "slice")));
  }
  for (size_t s = 0; s < speeds.size(); ++s) {
    if (!(speeds[s] > 0.0) || speeds[s] == kInfinity) {
      throw ConfigError(format(
          "the speed of slice {} is {}; speeds are finite and above 0", s,
          format_number(speeds[s])));
    }
  }
}

void check_costs(const std::vector<double>& costs) {
  for (size_t i = 0; i < costs.size(); ++i) {
    if (!(costs[i] >= 0.0) || costs[i] == kInfinity) {
      throw ConfigError(format(
          "the cost of layer {} is {}; costs are finite and 0 or more", i,
          format_number(costs[i])));
    }
  }
}

// What slices need, by running sums.
class Needs {
 public:
  Needs(const SliceMemory& memory, size_t layers, size_t slices)
      : fixed_(running_sums(memory.bytes)),
        stored_(running_sums(memory.stored_bytes)),
        counts_(memory.stored) {
    check("bytes", memory.bytes.size(), layers, "layer");
    check_optional("stored_bytes", memory.stored_bytes.size(), layers, "layer");
    check_optional("stored", counts_.size(), slices, "slice");
    check_optional("limits", memory.limits.size(), slices, "slice");
    limits_.assign(slices, kInfinity);
    for (size_t s = 0; s < memory.limits.size(); ++s) {
      if (memory.limits[s] <= 0) {
        throw ConfigError(format(
            "the memory limit of slice {} is {} bytes; give 1 or more", s,
            memory.limits[s]));
      }
      if (memory.limits[s] != kNoLimit) {
        limits_[s] = static_cast<double>(memory.limits[s]);
      }
    }
  }

  double need(size_t slice, size_t begin, size_t end) const {
    const double fixed = fixed_[end] - fixed_[begin];
    if (stored_.size() == 1) return fixed;
    const double count =
        counts_.empty() ? 1.0 : static_cast<double>(counts_[slice]);
    return fixed + count * (stored_[end] - stored_[begin]);
  }
  double limit(size_t slice) const { return limits_[slice]; }
  bool limited() const {
    return std::ranges::any_of(
        limits_, [](double limit) { return limit != kInfinity; });
  }

  // Gives every slice a finite limit, so that need / limit is defined.
  void limit_all() {
    double largest = 0.0;
    for (double limit : limits_) {
      if (limit != kInfinity) largest = std::max(largest, limit);
    }
    for (double& limit : limits_) {
      if (limit == kInfinity) limit = largest > 0.0 ? largest : 1.0;
    }
  }

 private:
  static void check(
      const std::string& field, size_t size, size_t wanted,
      const std::string& of) {
    if (size == wanted) return;
    throw ConfigError(format(
        "SliceMemory.{} has {} for {}", field, counted(size, "value"),
        counted(wanted, of)));
  }
  static void check_optional(
      const std::string& field, size_t size, size_t wanted,
      const std::string& of) {
    if (size != 0) check(field, size, wanted, of);
  }

  std::vector<double> fixed_;
  std::vector<double> stored_;
  std::vector<int64_t> counts_;
  std::vector<double> limits_;
};

// The partitions whose slices each cost at most `cost` and need at most `share`
// of their limits.
class Partitions {
 public:
  Partitions(
      const std::vector<double>& costs, size_t slices, const Needs* needs,
      const std::vector<double>& speeds = {})
      : sums_(running_sums(costs)),
        layers_(costs.size()),
        slices_(slices),
        speeds_(speeds.empty() ? std::vector<double>(slices, 1.0) : speeds),
        needs_(needs) {
    largest_layer_ = *std::ranges::max_element(costs);
  }

  void set_bound(double cost, double share) {
    cost_ = cost;
    share_ = share;
  }

  // A fairly even one of them, if there is any.
  std::optional<std::vector<size_t>> find() {
    find_windows();
    if (farthest_[slices_] < layers_ || !find_completable()) {
      return std::nullopt;
    }
    std::vector<size_t> partition{0};
    for (size_t slice = 0; slice < slices_; ++slice) {
      partition.push_back(best_end(slice, partition.back()));
    }
    return partition;
  }

  double cost(size_t slice, size_t begin, size_t end) const {
    return (sums_[end] - sums_[begin]) / speeds_[slice];
  }
  // No partition has a largest cost below that.
  double least_cost() const {
    return std::max(
        largest_layer_ / *std::ranges::max_element(speeds_), mean_from(0, 0));
  }
  double largest_cost(const std::vector<size_t>& partition) const {
    double largest = 0.0;
    for (size_t s = 0; s < slices_; ++s) {
      largest = std::max(largest, cost(s, partition[s], partition[s + 1]));
    }
    return largest;
  }
  double largest_share(const std::vector<size_t>& partition) const {
    double largest = 0.0;
    for (size_t s = 0; s < slices_; ++s) {
      largest = std::max(
          largest,
          needs_->need(s, partition[s], partition[s + 1]) / needs_->limit(s));
    }
    return largest;
  }

 private:
  // The cost of each slice from `slice` on, if they could all have the same.
  double mean_from(size_t slice, size_t begin) const {
    double speed = 0.0;
    for (size_t s = slice; s < slices_; ++s) speed += speeds_[s];
    return (sums_.back() - sums_[begin]) / speed;
  }
  bool fits(size_t slice, size_t begin, size_t end) const {
    return cost(slice, begin, end) <= cost_ &&
           (needs_ == nullptr ||
            needs_->need(slice, begin, end) <= share_ * needs_->limit(slice));
  }

  // The range of each boundary that the costs and the number of layers allow,
  // by filling greedily from the front and from the back.
  void find_windows() {
    farthest_.assign(slices_ + 1, 0);
    nearest_.assign(slices_ + 1, layers_);
    for (size_t i = 0; i < slices_; ++i) {
      size_t end = farthest_[i];
      const size_t last = layers_ - (slices_ - i - 1);
      while (end < last && cost(i, farthest_[i], end + 1) <= cost_) ++end;
      farthest_[i + 1] = end;
    }
    for (size_t i = slices_; i > 0; --i) {
      size_t begin = nearest_[i];
      while (begin > i - 1 && cost(i - 1, begin - 1, nearest_[i]) <= cost_) {
        --begin;
      }
      nearest_[i - 1] = begin;
    }
  }

  // completable_[i]: the positions of boundary i from which the slices i, i +
  // 1, … can be made. A nearer end is easier to keep, so each position needs
  // one candidate for the next boundary.
  bool find_completable() {
    completable_.assign(slices_ + 1, {});
    completable_[slices_] = {true};
    nearest_[slices_] = layers_;
    for (size_t i = slices_; i-- > 0;) {
      auto& here = completable_[i];
      const size_t low = std::max(nearest_[i], i);
      nearest_[i] = low;
      if (farthest_[i] < low) return false;
      here.assign(farthest_[i] - low + 1, false);
      const auto& next = completable_[i + 1];
      size_t end = nearest_[i + 1] + next.size();  // none yet
      size_t at = end;
      for (size_t begin = farthest_[i] + 1; begin-- > low;) {
        while (at > nearest_[i + 1] && at - 1 > begin) {
          --at;
          if (next[at - nearest_[i + 1]]) end = at;
        }
        here[begin - low] =
            end < nearest_[i + 1] + next.size() && fits(i, begin, end);
      }
    }
    return nearest_[0] == 0 && completable_[0][0];
  }

  size_t best_end(size_t slice, size_t begin) const {
    const auto& next = completable_[slice + 1];
    const size_t low = nearest_[slice + 1];
    const auto left = static_cast<double>(slices_ - slice);
    const double mean = mean_from(slice, begin);
    const double mean_count = static_cast<double>(layers_ - begin) / left;
    std::pair<double, double> best{kInfinity, kInfinity};
    size_t best_end = begin;
    for (size_t end = std::max(begin + 1, low); end < low + next.size();
         ++end) {
      if (!fits(slice, begin, end)) break;
      if (!next[end - low]) continue;
      const std::pair<double, double> distance{
          std::abs(cost(slice, begin, end) - mean),
          std::abs(static_cast<double>(end - begin) - mean_count)};
      if (distance < best) {
        best = distance;
        best_end = end;
      }
    }
    return best_end;
  }

  std::vector<double> sums_;
  size_t layers_;
  size_t slices_;
  std::vector<double> speeds_;
  double largest_layer_ = 0.0;
  const Needs* needs_;
  double cost_ = kInfinity;
  double share_ = 1.0;
  std::vector<size_t> farthest_;
  std::vector<size_t> nearest_;
  std::vector<std::vector<bool>> completable_;
};

// The partition with the smallest bound. `probe` finds a partition within a
// bound, `bound_of` returns the bound that a partition keeps, and no partition
// keeps less than `lowest`.
template <class Probe, class BoundOf>
std::optional<std::vector<size_t>>
smallest(double lowest, const Probe& probe, const BoundOf& bound_of) {
  auto best = probe(lowest);
  if (best) return best;
  best = probe(kInfinity);
  if (!best) return std::nullopt;
  double low = lowest;
  double high = bound_of(*best);
  while (high - low > kPrecision * high) {
    const double middle = low + (high - low) / 2;
    if (auto partition = probe(middle)) {
      // A partition often keeps less than was asked of it, which saves probes.
      high = bound_of(*partition);
      best = std::move(partition);
    } else {
      low = middle;
    }
  }
  return best;
}

std::optional<std::vector<size_t>> smallest_cost(Partitions& partitions) {
  return smallest(
      partitions.least_cost(),
      [&](double bound) {
        partitions.set_bound(bound, 1.0);
        return partitions.find();
      },
      [&](const auto& partition) {
        return partitions.largest_cost(partition);
      });
}

std::string shown(const SliceMemory& memory, size_t layer) {
  return memory.names.size() == memory.bytes.size()
             ? in_quotes(memory.names[layer])
             : std::to_string(layer);
}

std::string describe_slice(
    const std::vector<size_t>& partition, const SliceMemory& memory,
    size_t slice, int64_t bytes) {
  const size_t first = partition[slice];
  const size_t last = partition[slice + 1] - 1;
  const bool limited =
      !memory.limits.empty() && memory.limits[slice] != kNoLimit;
  return format(
      "slice {} (layer{} {}{}) needs {}{}", slice, first == last ? "" : "s",
      shown(memory, first), first == last ? "" : " to " + shown(memory, last),
      format_bytes(bytes),
      limited ? " of its " + format_bytes(memory.limits[slice]) : "");
}

std::string describe_slices(
    const std::vector<size_t>& partition, const SliceMemory& memory) {
  const auto bytes = slice_bytes(partition, memory);
  std::string text;
  for (size_t s = 0; s < std::min(bytes.size(), kSlicesInMessage); ++s) {
    text +=
        (s == 0 ? "" : ", ") + describe_slice(partition, memory, s, bytes[s]);
  }
  if (bytes.size() > kSlicesInMessage) {
    text += format(", and {} more slices", bytes.size() - kSlicesInMessage);
  }
  return text;
}

// The first layer that is called `name` or is inside that module.
std::optional<size_t>
first_layer(const std::vector<std::string>& names, const std::string& name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name || names[i].starts_with(name + ".")) return i;
  }
  return std::nullopt;
}

std::vector<std::string>
with_beginnings(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const auto& name : names) {
    for (size_t at = name.find('.'); at != std::string::npos;
         at = name.find('.', at + 1)) {
      const std::string beginning = name.substr(0, at);
      if (std::ranges::find(all, beginning) == all.end()) {
        all.push_back(beginning);
      }
    }
    all.push_back(name);
  }
  return all;
}

int64_t sum_of(const std::vector<int64_t>& shares) {
  return std::accumulate(shares.begin(), shares.end(), int64_t{0});
}

// Gives each its share rounded down, unless at least 1 for each is too many.
void begin_with_whole_parts(
    int64_t units, const std::vector<double>& weights,
    std::vector<int64_t>& shares) {
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> parts;
  for (const double weight : weights) {
    const double part = std::floor(static_cast<double>(units) * weight / all);
    parts.push_back(std::max<int64_t>(1, static_cast<int64_t>(part)));
  }
  if (sum_of(parts) <= units) shares = parts;
}

}  // namespace

std::vector<size_t> balance(const std::vector<double>& costs, size_t slices) {
  check_counts(costs.size(), slices);
  check_costs(costs);
  Partitions partitions(costs, slices, nullptr);
  return *smallest_cost(partitions);
}

std::vector<size_t> balance(
    const std::vector<double>& costs, size_t slices, const SliceMemory& memory,
    const std::vector<double>& speeds) {
  check_counts(costs.size(), slices);
  check_costs(costs);
  check_speeds(speeds, slices);
  const Needs needs(memory, costs.size(), slices);
  // The best partition mostly keeps the limits.
  Partitions free(costs, slices, nullptr, speeds);
  const auto unlimited = *smallest_cost(free);
  Partitions partitions(costs, slices, &needs, speeds);
  if (!needs.limited() || partitions.largest_share(unlimited) <= 1.0) {
    return unlimited;
  }
  if (auto partition = smallest_cost(partitions)) return *partition;
  return balance_memory(slices, memory);  // throws
}

std::vector<size_t> balance_memory(size_t slices, const SliceMemory& memory) {
  check_counts(memory.bytes.size(), slices);
  Needs needs(memory, memory.bytes.size(), slices);
  needs.limit_all();
  std::vector<double> costs;
  for (size_t i = 0; i < memory.bytes.size(); ++i) {
    // Costs only choose among partitions that keep the bound, so the count of
    // one slice serves for all.
    costs.push_back(needs.need(0, i, i + 1));
  }
  Partitions partitions(costs, slices, &needs);
  const auto partition = *smallest(
      0.0,
      [&](double share) {
        partitions.set_bound(kInfinity, share);
        return partitions.find();
      },
      [&](const auto& found) { return partitions.largest_share(found); });
  check_fits(partition, memory);
  return partition;
}

std::vector<int64_t>
slice_bytes(const std::vector<size_t>& partition, const SliceMemory& memory) {
  std::vector<int64_t> bytes;
  for (size_t s = 0; s + 1 < partition.size(); ++s) {
    int64_t sum = 0;
    for (size_t i = partition[s]; i < partition[s + 1]; ++i) {
      sum += memory.bytes[i];
      if (!memory.stored_bytes.empty()) {
        sum += memory.stored_bytes[i] *
               (memory.stored.empty() ? 1 : memory.stored[s]);
      }
    }
    bytes.push_back(sum);
  }
  return bytes;
}

void check_fits(
    const std::vector<size_t>& partition, const SliceMemory& memory) {
  if (memory.limits.empty()) return;
  const auto bytes = slice_bytes(partition, memory);
  const bool fits = std::equal(
      bytes.begin(), bytes.end(), memory.limits.begin(), std::less_equal<>());
  if (fits) return;
  throw ConfigError(format(
      "the model does not fit in {}: {}; use more slices, a smaller batch, "
      "more memory or finer layers",
      counted(bytes.size(), "slice"), describe_slices(partition, memory)));
}

std::vector<size_t> partition_at(
    const std::vector<std::string>& names,
    const std::vector<std::string>& first, size_t slices) {
  check_counts(names.size(), slices);
  const std::string place =
      format("cut = [{}]: ", join(first, ", ", in_quotes));
  if (first.size() + 1 != slices) {
    throw ConfigError(format(
        "{}{} begin {}, but there are {}; give {}, the first layer of each "
        "slice but the first one",
        place, counted(first.size(), "name"),
        counted(first.size() + 1, "slice"), slices,
        counted(slices - 1, "name")));
  }
  std::vector<size_t> partition{0};
  for (size_t i = 0; i < first.size(); ++i) {
    const auto layer = first_layer(names, first[i]);
    if (!layer) {
      throw ConfigError(format(
          "{}no layer is called \"{}\"{}", place, first[i],
          config::did_you_mean(first[i], with_beginnings(names))));
    }
    if (*layer == 0) {
      throw ConfigError(format(
          "{}\"{}\" is the first layer, which begins the first slice anyway; "
          "name the layer that begins the next one",
          place, first[i]));
    }
    if (*layer <= partition.back()) {
      throw ConfigError(format(
          "{}\"{}\" {} \"{}\"; name each layer once, in the order of the model",
          place, first[i],
          *layer == partition.back() ? "begins the same slice as"
                                     : "comes before",
          first[i - 1]));
    }
    partition.push_back(*layer);
  }
  partition.push_back(names.size());
  return partition;
}

std::vector<int64_t> share_out(
    int64_t units, const std::vector<double>& weights,
    const std::vector<double>& taken) {
  if (units < static_cast<int64_t>(weights.size())) return {};
  std::vector<int64_t> shares(weights.size(), 1);
  if (taken.empty()) begin_with_whole_parts(units, weights, shares);
  // The ratio with one unit more. The least is next; ties keep their order.
  using Next = std::pair<double, size_t>;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
  const auto push = [&](size_t i) {
    const double there = taken.empty() ? 0 : taken[i];
    next.emplace((static_cast<double>(shares[i] + 1) + there) / weights[i], i);
  };
  for (size_t i = 0; i < weights.size(); ++i) push(i);
  for (auto left = units - sum_of(shares); left > 0; --left) {
    const size_t i = next.top().second;
    next.pop();
    ++shares[i];
    push(i);
  }
  return shares;
}

}  // namespace echelon
