// The settings of a strategy by name, as `--fix` and `--explain` spell them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cost/strategy.h"

namespace echelon::planner {

/// One setting of a strategy, as a whole number: words count from 0.
struct SearchKey {
  std::string name;     // "tp"
  std::string meaning;  // a line
  int64_t (*value)(const cost::Strategy&) = nullptr;
  std::vector<std::string> words = {};  // of its values; empty: it is a number

  /// "8", "1f1b".
  std::string text_of(int64_t value) const;
};

/// dp, fsdp, data, tp, pp, cp, ep, microbatch, microbatches, schedule,
/// stages_per_rank, stage, gather, recompute, recompute_layers,
/// sequence_parallel, offload, activations, order, devices.
const std::vector<SearchKey>& search_keys();

/// Throws ConfigError for an unknown name, with the nearest.
const SearchKey& find_search_key(const std::string& name);

/// Settings that a search keeps fixed.
class Constraints {
 public:
  Constraints() = default;
  /// Throws ConfigError for an unknown key, a value that it does not take, and
  /// for two values of one key.
  explicit Constraints(
      const std::vector<std::pair<std::string, std::string>>& fixed);

  bool allow(const cost::Strategy& strategy) const;
  /// Whether `key` may have this value; true if it is not fixed.
  bool allow(const std::string& key, int64_t value) const;
  /// The same for these keys alone.
  bool allow(
      const cost::Strategy& strategy,
      std::initializer_list<const char*> keys) const;
  bool says(const std::string& key) const;
  /// The constraints without number `index` of fixed().
  Constraints without(size_t index) const;

  struct Fixed {
    const SearchKey* key = nullptr;
    int64_t value = 0;

    /// "tp=8".
    std::string text() const { return key->name + "=" + key->text_of(value); }
  };
  const std::vector<Fixed>& fixed() const { return fixed_; }

 private:
  std::vector<Fixed> fixed_;
};

}  // namespace echelon::planner
