// UnshardedUnits predicts: next_ maps a use and the one before it to the use
// that followed, as observed. Before it has observed anything, sets are
// expected in the order of registration in forward and in the reverse order in
// backward. use() reshards what is neither used, expected nor read by a running
// node, starts the all-gathers of the used units, then those of the expected
// ones, and waits for the used units only.
//
// UnitReducer keeps `order_`, this round's units with the last one first, and
// `position_`, the first of them that was not launched. A complete unit waits
// until those before it are launched, so every rank reduces in one order.
// `in_flight_` holds the launched reductions; each launch first advances them.
#include "echelon/parallel/shard/units.h"

#include <torch/types.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::sharding {
namespace {

using torch::Tensor;

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

// -------------------------------------------------------------- unsharding

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
    // After the step's last backward comes the next step's forward, for which
    // the update changes the parameters.
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

bool UnshardedUnits::read_by(const Node& node, size_t unit) const {
  return node && node == reader_ && contains(read_, unit);
}

void UnshardedUnits::use_by_node(size_t index, const Node& node, bool last) {
  if (node != reader_) read_.clear();
  reader_ = node;
  for (const size_t unit : sets_[index]) {
    if (!contains(read_, unit)) read_.push_back(unit);
  }
  use(index, node, last);
}

void UnshardedUnits::use(size_t index, const Node& node, bool last) {
  const Use use{index, node.has_value()};
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
  // The units that are used now come first: a group's collectives run in the
  // order in which they were started.
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

// ---------------------------------------------------------------- reduction

void UnitReducer::begin_round(
    std::vector<size_t> units, bool reduce, bool last) {
  end_round();
  drain();
  if (units.empty()) {
    units.resize(units_.size());
    std::iota(units.begin(), units.end(), 0);
  }
  // Backward completes the last unit first.
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

void UnitReducer::begin_default_round() {
  if (!open_) begin_round({}, /*reduce=*/true, /*last=*/true);
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
  begin_default_round();
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
  // This is a reference: the element is that of a vector<bool>.
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

// Starts the reduction of a unit. A unit that is still in flight from the round
// before is finished first, since it has one buffer.
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

// Ends the step. Units that no rank used in the last step are reduced after the
// ranks have agreed whether one of them is used now; all others are reduced
// before, without asking.
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
