#include "echelon/planner/search_key.h"

#include <algorithm>
#include <charconv>

#include "echelon/error.h"
#include "echelon/planner/axis_orders.h"
#include "echelon/schedule/options.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::planner {
namespace {

template <class Range, class Value>
int64_t index_in(const Range& range, const Value& value) {
  return std::ranges::find(range, value) - range.begin();
}

// The orders as layouts spell them.
std::vector<std::string> order_names() {
  std::vector<std::string> names;
  for (const auto& order : axis_orders()) {
    names.push_back(join(order, ":", short_name));
  }
  return names;
}

int64_t stages_of(const cost::Strategy& strategy) {
  if (strategy.stages_per_rank > 0) return strategy.stages_per_rank;
  return strategy.layout.pp > 1 ? stages_per_rank_of(strategy.schedule) : 1;
}

template <Axis axis>
int64_t degree(const cost::Strategy& strategy) {
  return strategy.layout.degree(axis);
}

std::vector<SearchKey> make_keys() {
  const std::vector<std::string> switches = {"false", "true"};
  using S = const cost::Strategy&;
  return {
      {"dp", "replicas of the model", degree<Axis::dp_replicate>},
      {"fsdp", "ranks that shard the parameters", degree<Axis::dp_shard>},
      {"data", "ranks with different samples: dp * fsdp",
       [](S s) { return s.layout.data_degree(); }},
      {"tp", "ranks that shard each layer's matrices", degree<Axis::tp>},
      {"pp", "pipeline ranks", degree<Axis::pp>},
      {"cp", "ranks that shard the sequence", degree<Axis::cp>},
      {"ep", "ranks among which the experts are spread", degree<Axis::ep>},
      {"microbatch", "samples of a microbatch",
       [](S s) { return s.microbatch_size; }},
      {"microbatches", "of a data-parallel rank in a step",
       [](S s) { return s.num_microbatches(); }},
      {"schedule", "order in which pipeline ranks compute",
       [](S s) { return static_cast<int64_t>(s.schedule); }, schedule_names()},
      {"stages_per_rank", "pipeline stages that a rank holds", stages_of},
      {"stage",
       "what fsdp shards (ZeRO): 1 optimizer state, 2 gradients, 3 parameters",
       [](S s) { return s.zero_stage; }},
      {"gather",
       "stage 3: parameters stay unsharded while used, or for the step",
       [](S s) { return int64_t{s.unshard_once}; },
       {"use", "step"}},
      {"recompute",
       "what backward recomputes",
       [](S s) { return static_cast<int64_t>(s.recompute); },
       {"none", "selective", "all"}},
      {"recompute_layers", "of a stage; -1: all",
       [](S s) { return s.recompute_layers; }},
      {"sequence_parallel", "of tensor parallelism",
       [](S s) { return int64_t{s.sequence_parallel}; }, switches},
      {"offload",
       "optimizer state in the host's memory",
       [](S s) { return int64_t{s.offload_optimizer}; },
       {"none", "optimizer"}},
      {"activations",
       "kept for backward on the device, or in the host's memory",
       [](S s) { return int64_t{s.offload_activations}; },
       {"keep", "offload"}},
      {"order", "of the axes, outermost first",
       [](S s) { return index_in(axis_orders(), s.layout.order); },
       order_names()},
      {"devices", "that the job takes",
       [](S s) { return s.layout.num_ranks(); }},
  };
}

int64_t parse(const SearchKey& key, const std::string& text) {
  const std::string place = "--fix " + key.name + "=" + text;
  if (!key.words.empty()) {
    const int64_t index = index_in(key.words, text);
    if (index < static_cast<int64_t>(key.words.size())) return index;
    throw ConfigError(format(
        "{}: must be one of {}{}", place, join(key.words, ", "),
        config::did_you_mean(text, key.words)));
  }
  int64_t value = 0;
  const auto* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  const int64_t lowest = key.name == "recompute_layers" ? -1
                         : key.name == "stage"          ? 0
                                                        : 1;
  if (error != std::errc() || at != end || value < lowest) {
    throw ConfigError(
        format("{}: must be a whole number of at least {}", place, lowest));
  }
  return value;
}

}  // namespace

std::string SearchKey::text_of(int64_t value) const {
  if (words.empty()) return std::to_string(value);
  return words.at(static_cast<size_t>(value));
}

const std::vector<SearchKey>& search_keys() {
  static const std::vector<SearchKey> keys = make_keys();
  return keys;
}

const SearchKey& find_search_key(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& key : search_keys()) {
    if (key.name == name) return key;
    names.push_back(key.name);
  }
  throw ConfigError(format(
      "\"{}\" is not a setting that is searched: {}{}", name, join(names, ", "),
      config::did_you_mean(name, names)));
}

Constraints::Constraints(
    const std::vector<std::pair<std::string, std::string>>& fixed) {
  for (const auto& [name, text] : fixed) {
    const SearchKey& key = find_search_key(name);
    const int64_t value = parse(key, text);
    for (const auto& other : fixed_) {
      if (other.key != &key || other.value == value) continue;
      throw ConfigError(format(
          "--fix {}={} and --fix {}={} contradict each other; leave one out",
          name, key.text_of(other.value), name, text));
    }
    fixed_.push_back({&key, value});
  }
}

bool Constraints::allow(const cost::Strategy& strategy) const {
  return std::ranges::all_of(fixed_, [&](const Fixed& fixed) {
    return fixed.key->value(strategy) == fixed.value;
  });
}

bool Constraints::allow(const std::string& key, int64_t value) const {
  return std::ranges::all_of(fixed_, [&](const Fixed& fixed) {
    return fixed.key->name != key || fixed.value == value;
  });
}

bool Constraints::allow(
    const cost::Strategy& strategy,
    std::initializer_list<const char*> keys) const {
  return std::ranges::all_of(fixed_, [&](const Fixed& fixed) {
    const bool asked = std::ranges::any_of(
        keys, [&](const char* key) { return fixed.key->name == key; });
    return !asked || fixed.key->value(strategy) == fixed.value;
  });
}

bool Constraints::says(const std::string& key) const {
  return std::ranges::any_of(
      fixed_, [&](const Fixed& fixed) { return fixed.key->name == key; });
}

Constraints Constraints::without(size_t index) const {
  Constraints rest = *this;
  rest.fixed_.erase(rest.fixed_.begin() + static_cast<std::ptrdiff_t>(index));
  return rest;
}
}  // namespace echelon::planner
