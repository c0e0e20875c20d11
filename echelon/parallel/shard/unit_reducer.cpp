#include "echelon/parallel/shard/unit_reducer.h"

#include <torch/types.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "echelon/error.h"

namespace echelon::sharding {

using torch::Tensor;

void UnitReducer::begin_round(
    std::vector<size_t> units, bool reduce, bool last) {
  end_round();
  drain();
  if (units.empty()) {
    units.resize(units_.size());
    std::iota(units.begin(), units.end(), 0);
  }
  std::sort(units.rbegin(), units.rend());
  std::erase_if(units, [&](size_t unit) {
    return units_[unit]->num_trainable == 0 || unused_.count(unit) > 0;
  });
  order_ = std::move(units);
  position_ = 0;
  open_ = true;
  reduce_ = reduce;
  last_ = last;
  for (const auto& unit : units_) {
    unit->launched = false;
    unit->arrived = 0;
    for (auto& flat : unit->has_arrived) {
      std::fill(flat.begin(), flat.end(), false);
    }
  }
}

void UnitReducer::end_round() {
  if (!open_) return;
  open_ = false;
  if (!reduce_) return;
  while (position_ < order_.size()) launch(order_[position_++]);
}

bool UnitReducer::complete(size_t unit) const {
  return units_[unit]->arrived == units_[unit]->num_trainable;
}

void UnitReducer::add(
    size_t index, size_t flat, size_t parameter, const Tensor& gradient) {
  if (!open_) begin_round({}, /*reduce=*/true, /*last=*/true);
  Unit& unit = *units_[index];
  FlatBuffer& buffer = *unit.flats[flat];
  if (unit.launched) {
    throw ConfigError(
        "[sharded data parallel] the gradient of \"" +
        buffer.parameter_name(parameter) + "\" came once more after \"" +
        unit.name +
        "\" was reduced; call begin_backward() before each backward, or run "
        "each part of the model once per backward");
  }
  if (gradient.defined()) {
    buffer.add_gradient(parameter, gradient);
    unit.used = true;
  }
  auto has = unit.has_arrived[flat][parameter];
  if (has) return;
  has = true;
  ++unit.arrived;
  if (reduce_ && complete(index)) launch_complete();
}

void UnitReducer::launch_complete() {
  while (position_ < order_.size() && complete(order_[position_])) {
    launch(order_[position_++]);
  }
}

void UnitReducer::launch(size_t index) {
  Unit& unit = *units_[index];
  unit.launched = true;
  advance_all();
  if (std::count(in_flight_.begin(), in_flight_.end(), index) > 0) drain();
  std::vector<std::pair<std::string, Tensor>> parameters;
  if (around_.options.before_reduce) {
    for (const auto& flat : unit.flats) {
      if (!flat->trainable()) continue;
      flat->show_gradients(true);
      for (size_t i = 0; i < flat->num_parameters(); ++i) {
        parameters.emplace_back(flat->parameter_name(i), flat->parameter(i));
      }
    }
    around_.options.before_reduce(parameters);
    for (const auto& flat : unit.flats) {
      if (flat->trainable()) flat->show_gradients(false);
    }
  }
  for (const auto& flat : unit.flats) {
    if (flat->trainable()) flat->start_reduce();
  }
  if (last_) unit.reduced_last = true;
  in_flight_.push_back(index);
}

// So that flat gradients of two units at most are here: one under way, and one
// that backward fills.
void UnitReducer::advance_all() {
  std::erase_if(in_flight_, [&](size_t index) {
    bool done = true;
    for (const auto& flat : units_[index]->flats) {
      if (flat->trainable()) done &= flat->advance_reduce();
    }
    return done;
  });
}

void UnitReducer::drain() {
  while (!in_flight_.empty()) advance_all();
}

// Which units had a gradient on some rank. Asked in the first step, and in
// every one after it when some rank did not use all then: what nobody used is
// not updated, as on one device.
void UnitReducer::ask_who_used() {
  const int64_t ranks = around_.shard.size() * around_.replicate.size();
  std::vector<int32_t> used;
  for (const auto& unit : units_) used.push_back(unit->used);
  Tensor counts = torch::tensor(used, torch::kInt32).to(around_.pool.device());
  const Call call{.label = "used units"};
  around_.shard.all_reduce(counts, ReduceOp::sum, call);
  around_.replicate.all_reduce(counts, ReduceOp::sum, call);
  counts = counts.cpu();
  const auto* count = counts.const_data_ptr<int32_t>();
  unused_.clear();
  for (size_t i = 0; i < units_.size(); ++i) {
    if (units_[i]->num_trainable == 0) continue;
    if (count[i] < ranks) asks_always_ = true;
    if (count[i] == 0) unused_.insert(i);
    units_[i]->used = count[i] > 0;
  }
  asked_ = true;
}

void UnitReducer::finish() {
  last_ = true;
  end_round();
  const auto left = [&](size_t index) {
    const Unit& unit = *units_[index];
    return unit.num_trainable > 0 && !unit.reduced_last;
  };
  const auto known_unused = unused_;
  for (size_t i = units_.size(); i-- > 0;) {
    if (left(i) && known_unused.count(i) == 0) launch(i);
  }
  if (!asked_ || asks_always_) ask_who_used();
  for (const size_t i : known_unused) {
    if (left(i) && units_[i]->used) launch(i);
  }
  drain();
  for (size_t i = 0; i < units_.size(); ++i) {
    for (const auto& flat : units_[i]->flats) {
      if (!flat->trainable()) continue;
      if (unused_.count(i) > 0) {
        flat->clear_gradients();
      } else {
        flat->finish_reduce();
      }
    }
  }
  around_.pool.trim();
}

void UnitReducer::clear() {
  drain();
  open_ = false;
  last_ = true;
  for (const auto& unit : units_) {
    unit->used = false;
    unit->reduced_last = false;
    for (const auto& flat : unit->flats) flat->clear_gradients();
  }
}

}  // namespace echelon::sharding
