#include "echelon/parallel/shard/gathered_units.h"

#include <algorithm>
#include <utility>

namespace echelon::sharding {
namespace {

bool contains(const std::vector<size_t>& list, size_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

bool Unit::gathered() const {
  return std::all_of(flats.begin(), flats.end(), [](const auto& flat) {
    return flat->gathered();
  });
}

bool Unit::idle() const {
  return std::none_of(flats.begin(), flats.end(), [](const auto& flat) {
    return flat->gathered() || flat->gathering();
  });
}

int64_t Unit::gathered_bytes() const {
  int64_t bytes = 0;
  for (const auto& flat : flats) bytes += flat->gathered_bytes();
  return bytes;
}

size_t GatheredUnits::make_set(std::vector<size_t> units) {
  found_.emplace(units, sets_.size());
  sets_.push_back(std::move(units));
  return sets_.size() - 1;
}

size_t GatheredUnits::find_set(const std::vector<size_t>& units) {
  const auto found = found_.find(units);
  return found != found_.end() ? found->second : make_set(units);
}

bool GatheredUnits::ready(const std::vector<size_t>& units) const {
  return std::all_of(units.begin(), units.end(), [&](size_t unit) {
    return units_[unit]->gathered();
  });
}

std::optional<GatheredUnits::Place>
GatheredUnits::after(const Context& context) const {
  if (const auto known = next_.find(context); known != next_.end()) {
    return known->second;
  }
  const Place& place = context.second;
  if (place.backward) {
    if (place.set == 0) return std::nullopt;
    return Place{place.set - 1, true};
  }
  if (place.set + 1 == sets_.size()) return Place{place.set, true};
  return Place{place.set + 1, false};
}

// Units to gather while the current ones are used.
std::vector<size_t> GatheredUnits::ahead(bool last) const {
  std::vector<size_t> ahead;
  int64_t bytes = 0;
  Context context{before_, *current_};
  const auto& used = sets_[current_->set];
  // A chain may be a circle of sets that are here.
  for (size_t steps = 0; steps <= 2 * sets_.size(); ++steps) {
    if (static_cast<int64_t>(ahead.size()) >= options_.prefetch) break;
    const auto next = after(context);
    if (!next) break;
    if (last && context.second.backward && !next->backward) break;
    for (const size_t unit : sets_[next->set]) {
      if (contains(used, unit) || contains(ahead, unit)) continue;
      bytes += units_[unit]->gathered_bytes();
      if (options_.prefetch_bytes > 0 && bytes > options_.prefetch_bytes) {
        return ahead;
      }
      ahead.push_back(unit);
    }
    context = {context.second, *next};
  }
  return ahead;
}

bool GatheredUnits::is_reader(const Node& node) const {
  return !reader_.owner_before(node) && !node.owner_before(reader_);
}

bool GatheredUnits::read_by(const Node& node, size_t unit) const {
  return node != nullptr && is_reader(node) && contains(read_, unit);
}

void GatheredUnits::use_by_node(size_t index, const Node& node, bool last) {
  if (!is_reader(node)) read_.clear();
  reader_ = node;
  for (const size_t unit : sets_[index]) {
    if (!contains(read_, unit)) read_.push_back(unit);
  }
  use(index, node, last);
}

void GatheredUnits::use(size_t index, const Node& node, bool last) {
  const Place place{index, node != nullptr};
  const auto& units = sets_[index];
  if (current_ == place && ready(units)) return;
  if (current_ != place) {
    if (current_) next_[{before_, *current_}] = place;
    before_ = std::exchange(current_, place);
  }
  const auto ahead = this->ahead(last);
  if (!keep_) {
    for (size_t i = 0; i < units_.size(); ++i) {
      if (contains(units, i) || contains(ahead, i) || read_by(node, i))
        continue;
      release(i);
    }
  }
  const auto start = [&](const std::vector<size_t>& list) {
    for (const size_t unit : list) {
      for (const auto& flat : units_[unit]->flats) flat->start_gather();
    }
  };
  start(units);
  start(ahead);
  for (const size_t unit : units) {
    for (const auto& flat : units_[unit]->flats) flat->finish_gather();
  }
}

void GatheredUnits::pin(const std::vector<size_t>& units) {
  for (const size_t unit : units) ++units_[unit]->pins;
}

void GatheredUnits::unpin(const std::vector<size_t>& units) {
  for (const size_t unit : units) --units_[unit]->pins;
}

void GatheredUnits::release(size_t index) {
  Unit& unit = *units_[index];
  if (keep_ || unit.pins > 0 || unit.idle()) return;
  for (const auto& flat : unit.flats) flat->release();
}

void GatheredUnits::forget() {
  before_.reset();
  current_.reset();
}

}  // namespace echelon::sharding
