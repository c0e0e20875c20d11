#include "echelon/data/sources/order.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "echelon/data/sources/random.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void shuffle_by(RandomStream random, std::vector<int64_t>& values) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[random.below(i)]);
  }
}

__extension__ using int128 = __int128;

/// The samples of one source in an epoch, in order.
std::vector<int64_t> source_order(
    const std::vector<int64_t>& samples, int64_t count, uint64_t seed,
    size_t source, int64_t epoch, bool shuffle) {
  const auto size = static_cast<int128>(samples.size());
  const int128 begin = static_cast<int128>(epoch) * count;
  auto pass = static_cast<int64_t>(begin / size);
  auto at = static_cast<size_t>(begin % size);
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(count));
  while (static_cast<int64_t>(order.size()) < count) {
    std::vector<int64_t> one = samples;
    if (shuffle) {
      shuffle_by(
          RandomStream(
              RandomUse::blend,
              {seed, uint64_t{source}, static_cast<uint64_t>(pass)}),
          one);
    }
    const size_t left = static_cast<size_t>(count) - order.size();
    const size_t end = std::min(one.size(), at + left);
    order.insert(
        order.end(), one.begin() + static_cast<ptrdiff_t>(at),
        one.begin() + static_cast<ptrdiff_t>(end));
    at = 0;
    ++pass;
  }
  return order;
}

}  // namespace

int64_t num_holdout(int64_t num_samples, double holdout) {
  if (!(holdout >= 0.0 && holdout < 1.0)) {
    throw ConfigError(format(
        "[data] holdout={:f}: must be 0 or more and less than 1", holdout));
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
  const auto middle = order.end() - held;
  Split split{{order.begin(), middle}, {middle, order.end()}};
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

std::vector<int64_t>
blend_counts(int64_t total, std::span<const double> weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> counts;
  std::vector<std::pair<double, size_t>> rests;  // lost by rounding, negated
  int64_t left = total;
  for (size_t s = 0; s < weights.size(); ++s) {
    const double exact = static_cast<double>(total) * (weights[s] / sum);
    counts.push_back(static_cast<int64_t>(std::floor(exact)));
    rests.emplace_back(static_cast<double>(counts.back()) - exact, s);
    left -= counts.back();
  }
  std::sort(rests.begin(), rests.end());
  for (size_t i = 0; left > 0; i = (i + 1) % rests.size(), --left) {
    ++counts[rests[i].second];
  }
  for (size_t s = 0; s < counts.size(); ++s) {
    if (counts[s] > 0) continue;
    throw ConfigError(format(
        "[data] weights: of an epoch's {} samples source {} would get none; "
        "raise its weight or leave it out",
        total, s));
  }
  return counts;
}

// Spreads each source evenly: sample j of `count` belongs into the turns [j *
// total / count, (j + 1) * total / count). Each turn takes, among the sources
// whose next sample may come, the one with the earliest deadline, so none
// misses its own.
std::vector<int64_t> blend_order(
    const std::vector<std::vector<int64_t>>& sources,
    std::span<const int64_t> counts, uint64_t seed, int64_t epoch,
    bool shuffle) {
  struct Source {
    std::vector<int64_t> order;
    size_t taken = 0;
    int64_t release = 0;   // the first turn for its next sample
    int64_t deadline = 0;  // the turn before which it must have come
  };
  const int64_t total =
      std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::vector<Source> turns;
  const auto set_window = [&](Source& source, int64_t count) {
    const auto j = static_cast<int128>(source.taken);
    source.release = static_cast<int64_t>(j * total / count);
    source.deadline =
        static_cast<int64_t>(((j + 1) * total + count - 1) / count);
  };
  for (size_t s = 0; s < sources.size(); ++s) {
    turns.push_back(
        {source_order(sources[s], counts[s], seed, s, epoch, shuffle)});
    set_window(turns.back(), counts[s]);
  }
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(total));
  for (int64_t k = 0; k < total; ++k) {
    size_t next = turns.size();
    for (size_t s = 0; s < turns.size(); ++s) {
      const auto& source = turns[s];
      if (source.taken == source.order.size() || source.release > k) continue;
      if (next == turns.size() || source.deadline < turns[next].deadline) {
        next = s;
      }
    }
    order.push_back(turns[next].order[turns[next].taken++]);
    set_window(turns[next], counts[next]);
  }
  return order;
}

Share rank_share(
    int64_t batch_samples, int64_t rank, int64_t num_ranks,
    std::span<const int64_t> rank_batch) {
  if (rank < 0 || rank >= num_ranks) {
    throw ConfigError(
        format("rank {} is outside of {} ranks", rank, num_ranks));
  }
  int64_t before = rank;
  int64_t after = rank + 1;
  int64_t total = num_ranks;
  if (!rank_batch.empty()) {
    if (rank_batch.size() != static_cast<size_t>(num_ranks)) {
      throw ConfigError(format(
          "[train] rank_batch has {} numbers for {} data-parallel ranks; it "
          "needs one each",
          rank_batch.size(), num_ranks));
    }
    before = 0;
    total = 0;
    for (size_t i = 0; i < rank_batch.size(); ++i) {
      if (rank_batch[i] < 0) {
        throw ConfigError(format(
            "[train] rank_batch holds {}; a rank takes 0 or more samples",
            rank_batch[i]));
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
    return static_cast<int64_t>(
        static_cast<int128>(batch_samples) * sum / total);
  };
  return {at(before), at(after)};
}

}  // namespace echelon
