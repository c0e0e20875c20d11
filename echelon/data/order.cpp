#include "echelon/data/order.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "echelon/data/random.h"
#include "echelon/error.h"

namespace echelon {
namespace {

void shuffle_by(RandomStream random, std::vector<int64_t>& values) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[random.below(i)]);
  }
}

}  // namespace

int64_t num_holdout(int64_t num_samples, double holdout) {
  if (!(holdout >= 0.0 && holdout < 1.0)) {
    throw ConfigError(
        "[data] holdout=" + std::to_string(holdout) +
        ": must be 0 or more and less than 1");
  }
  if (holdout == 0.0 || num_samples < 2) return 0;
  const auto nearest = static_cast<int64_t>(
      std::floor(static_cast<double>(num_samples) * holdout + 0.5));
  return std::clamp<int64_t>(nearest, 1, num_samples - 1);
}

Split split_samples(int64_t num_samples, double holdout, uint64_t seed) {
  const int64_t held = num_holdout(num_samples, holdout);
  std::vector<int64_t> order(static_cast<size_t>(num_samples));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (held > 0) shuffle_by(RandomStream(RandomUse::split, {seed}), order);
  const auto cut = order.end() - held;
  Split split{{order.begin(), cut}, {cut, order.end()}};
  std::sort(split.train.begin(), split.train.end());
  std::sort(split.holdout.begin(), split.holdout.end());
  return split;
}

std::vector<int64_t> epoch_order(
    std::vector<int64_t> samples, uint64_t seed, int64_t epoch, bool shuffle) {
  if (shuffle) {
    shuffle_by(
        RandomStream(RandomUse::order, {seed, static_cast<uint64_t>(epoch)}),
        samples);
  }
  return samples;
}

Share rank_share(
    int64_t batch_samples,
    int64_t rank,
    int64_t num_ranks,
    std::span<const int64_t> rank_batch) {
  if (rank < 0 || rank >= num_ranks) {
    throw ConfigError(
        "rank " + std::to_string(rank) + " is outside of " +
        std::to_string(num_ranks) + " ranks");
  }
  int64_t before = rank;
  int64_t after = rank + 1;
  int64_t total = num_ranks;
  if (!rank_batch.empty()) {
    if (rank_batch.size() != static_cast<size_t>(num_ranks)) {
      throw ConfigError(
          "[train] rank_batch has " + std::to_string(rank_batch.size()) +
          " numbers for " + std::to_string(num_ranks) +
          " data-parallel ranks; it needs one each");
    }
    before = 0;
    total = 0;
    for (size_t i = 0; i < rank_batch.size(); ++i) {
      if (rank_batch[i] < 0) {
        throw ConfigError(
            "[train] rank_batch holds " + std::to_string(rank_batch[i]) +
            "; a rank takes 0 or more samples");
      }
      if (static_cast<int64_t>(i) == rank) before = total;
      total += rank_batch[i];
      if (static_cast<int64_t>(i) == rank) after = total;
    }
    if (total == 0) {
      throw ConfigError(
          "[train] rank_batch: its sum is 0; some rank must work");
    }
  }
  const auto at = [&](int64_t sum) {
    __extension__ using int128 = __int128;
    return static_cast<int64_t>(
        static_cast<int128>(batch_samples) * sum / total);
  };
  return {at(before), at(after)};
}

}  // namespace echelon
