#include "echelon/parallel/shard/unit_reducer.h"

#include <torch/types.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

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
  for (const auto& unit : units_) unit->begin_round();
}

void UnitReducer::end_round() {
  if (!open_) return;
  open_ = false;
  if (!reduce_) return;
  while (position_ < order_.size()) launch(order_[position_++]);
}

bool UnitReducer::complete(size_t unit) const {
  return units_[unit]->round.num_arrived == units_[unit]->num_trainable;
}

void UnitReducer::add(
    size_t index, size_t flat, size_t parameter, const Tensor& gradient) {
  if (!open_) begin_round({}, /*reduce=*/true, /*last=*/true);
  Unit& unit = *units_[index];
  FlatBuffer& buffer = *unit.flats[flat];
  if (unit.round.launched) {
    throw ConfigError(format(
        "[sharded data parallel] the gradient of \"{}\" came once more after "
        "\"{}\" was reduced; call begin_backward() before each backward, or "
        "run each part of the model once per backward",
        buffer.parameter_name(parameter), unit.name));
  }
  if (gradient.defined()) {
    buffer.add_gradient(parameter, gradient);
    unit.step.used = true;
  }
  auto arrived = unit.round.arrived[flat][parameter];
  if (arrived) return;
  arrived = true;
  ++unit.round.num_arrived;
  if (reduce_ && complete(index)) launch_complete();
}

void UnitReducer::launch_complete() {
  while (position_ < order_.size() && complete(order_[position_])) {
    launch(order_[position_++]);
  }
}

void UnitReducer::launch(size_t index) {
  Unit& unit = *units_[index];
  unit.round.launched = true;
  advance_all();
  if (std::count(in_flight_.begin(), in_flight_.end(), index) > 0) drain();
  std::vector<std::pair<std::string, Tensor>> parameters;
  if (context_.options.before_reduce) {
    for (const auto& flat : unit.flats) {
      if (!flat->trainable()) continue;
      flat->expose_gradients(true);
      for (size_t i = 0; i < flat->num_parameters(); ++i) {
        parameters.emplace_back(flat->parameter_name(i), flat->parameter(i));
      }
    }
    context_.options.before_reduce(parameters);
    for (const auto& flat : unit.flats) {
      if (flat->trainable()) flat->expose_gradients(false);
    }
  }
  for (const auto& flat : unit.flats) {
    if (flat->trainable()) flat->start_reduce();
  }
  if (last_) unit.step.reduced = true;
  in_flight_.push_back(index);
}

// Keeps at most two unsharded gradients in memory: one that is being reduced,
// and one that backward fills.
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

// The ranks agree on which units had a gradient on some rank: a unit that no
// rank used is not updated, as on one device. They do so in the first step, and
// in every step after one in which some rank did not use all units.
void UnitReducer::agree_on_used_units() {
  const int64_t ranks = context_.shard.size() * context_.replicate.size();
  std::vector<int32_t> used;
  for (const auto& unit : units_) used.push_back(unit->step.used);
  Tensor counts = torch::tensor(used, torch::kInt32).to(context_.pool.device());
  const Call call{.label = "used units"};
  context_.shard.all_reduce(counts, ReduceOp::sum, call);
  context_.replicate.all_reduce(counts, ReduceOp::sum, call);
  counts = counts.cpu();
  const auto* count = counts.const_data_ptr<int32_t>();
  unused_.clear();
  for (size_t i = 0; i < units_.size(); ++i) {
    if (units_[i]->num_trainable == 0) continue;
    if (count[i] < ranks) agrees_every_step_ = true;
    if (count[i] == 0) unused_.insert(i);
    units_[i]->step.used = count[i] > 0;
  }
  agreed_once_ = true;
}

void UnitReducer::finish() {
  last_ = true;
  end_round();
  const auto pending = [&](size_t index) {
    const Unit& unit = *units_[index];
    return unit.num_trainable > 0 && !unit.step.reduced;
  };
  const auto known_unused = unused_;
  for (size_t i = units_.size(); i-- > 0;) {
    if (pending(i) && known_unused.count(i) == 0) launch(i);
  }
  if (!agreed_once_ || agrees_every_step_) agree_on_used_units();
  for (const size_t i : known_unused) {
    if (pending(i) && units_[i]->step.used) launch(i);
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
  context_.pool.trim();
}

void UnitReducer::clear() {
  drain();
  open_ = false;
  last_ = true;
  for (const auto& unit : units_) {
    unit->step = {};
    for (const auto& flat : unit->flats) flat->clear_gradients();
  }
}

}  // namespace echelon::sharding
