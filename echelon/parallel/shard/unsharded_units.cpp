#include "echelon/parallel/shard/unsharded_units.h"

#include <algorithm>
#include <utility>

namespace echelon::sharding {
namespace {

bool contains(const std::vector<size_t>& list, size_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

bool Unit::unsharded() const {
  return std::all_of(flats.begin(), flats.end(), [](const auto& flat) {
    return flat->unsharded();
  });
}

bool Unit::resharded() const {
  return std::none_of(flats.begin(), flats.end(), [](const auto& flat) {
    return flat->unsharded() || flat->unsharding();
  });
}

int64_t Unit::unsharded_bytes() const {
  int64_t bytes = 0;
  for (const auto& flat : flats) bytes += flat->unsharded_bytes();
  return bytes;
}

void Unit::start_unshard() {
  for (const auto& flat : flats) flat->start_unshard();
}

void Unit::finish_unshard() {
  for (const auto& flat : flats) flat->finish_unshard();
}

void Unit::begin_round() {
  round = {};
  for (const auto& flat : flats) {
    round.arrived.emplace_back(flat->num_parameters());
  }
}

size_t UnshardedUnits::make_set(std::vector<size_t> units) {
  set_of_units_.emplace(units, sets_.size());
  sets_.push_back(std::move(units));
  return sets_.size() - 1;
}

size_t UnshardedUnits::find_set(const std::vector<size_t>& units) {
  const auto found = set_of_units_.find(units);
  return found != set_of_units_.end() ? found->second : make_set(units);
}

bool UnshardedUnits::ready(const std::vector<size_t>& units) const {
  return std::all_of(units.begin(), units.end(), [&](size_t unit) {
    return units_[unit]->unsharded();
  });
}

std::optional<UnshardedUnits::Use>
UnshardedUnits::use_after(const Context& context) const {
  if (const auto known = next_.find(context); known != next_.end()) {
    return known->second;
  }
  const Use& use = context.second;
  if (use.backward) {
    if (use.set == 0) return std::nullopt;
    return Use{use.set - 1, true};
  }
  if (use.set + 1 == sets_.size()) return Use{use.set, true};
  return Use{use.set + 1, false};
}

// Units to unshard while the current ones are used.
std::vector<size_t> UnshardedUnits::units_to_prefetch(bool last) const {
  std::vector<size_t> ahead;
  int64_t bytes = 0;
  Context context{previous_, *current_};
  const auto& used = sets_[current_->set];
  // Bounded: the predicted uses may go in a circle of sets that are in use.
  for (size_t steps = 0; steps <= 2 * sets_.size(); ++steps) {
    if (static_cast<int64_t>(ahead.size()) >= options_.prefetch) break;
    const auto next = use_after(context);
    if (!next) break;
    if (last && context.second.backward && !next->backward) break;
    for (const size_t unit : sets_[next->set]) {
      if (contains(used, unit) || contains(ahead, unit)) continue;
      bytes += units_[unit]->unsharded_bytes();
      if (options_.prefetch_bytes > 0 && bytes > options_.prefetch_bytes) {
        return ahead;
      }
      ahead.push_back(unit);
    }
    context = {context.second, *next};
  }
  return ahead;
}

bool UnshardedUnits::is_reader(const Node& node) const {
  return !reader_.owner_before(node) && !node.owner_before(reader_);
}

bool UnshardedUnits::read_by(const Node& node, size_t unit) const {
  return node != nullptr && is_reader(node) && contains(read_, unit);
}

void UnshardedUnits::use_by_node(size_t index, const Node& node, bool last) {
  if (!is_reader(node)) read_.clear();
  reader_ = node;
  for (const size_t unit : sets_[index]) {
    if (!contains(read_, unit)) read_.push_back(unit);
  }
  use(index, node, last);
}

void UnshardedUnits::use(size_t index, const Node& node, bool last) {
  const Use use{index, node != nullptr};
  const auto& units = sets_[index];
  if (current_ == use && ready(units)) return;
  if (current_ != use) {
    if (current_) next_[{previous_, *current_}] = use;
    previous_ = std::exchange(current_, use);
  }
  const auto ahead = units_to_prefetch(last);
  if (!keep_) {
    for (size_t i = 0; i < units_.size(); ++i) {
      if (contains(units, i) || contains(ahead, i) || read_by(node, i)) {
        continue;
      }
      reshard(i);
    }
  }
  for (const size_t unit : units) units_[unit]->start_unshard();
  for (const size_t unit : ahead) units_[unit]->start_unshard();
  for (const size_t unit : units) units_[unit]->finish_unshard();
}

void UnshardedUnits::pin(const std::vector<size_t>& units) {
  for (const size_t unit : units) ++units_[unit]->pins;
}

void UnshardedUnits::unpin(const std::vector<size_t>& units) {
  for (const size_t unit : units) --units_[unit]->pins;
}

void UnshardedUnits::reshard(size_t index) {
  Unit& unit = *units_[index];
  if (keep_ || unit.pins > 0 || unit.resharded()) return;
  for (const auto& flat : unit.flats) flat->reshard();
}

void UnshardedUnits::reset_order() {
  previous_.reset();
  current_.reset();
}

}  // namespace echelon::sharding
