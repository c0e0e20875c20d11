// The order of an epoch's samples, and each rank's share of them. The order
// does not depend on the number of ranks: ranks take slices of one global
// order.
//
// Orders are Fisher-Yates shuffles driven by random.h, keyed by the seed (and
// the epoch), so they are the same on every platform.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace echelon {

/// A run's position in its data. It does not depend on the number of ranks or
/// on the batch size: a run can resume from it with others.
struct Position {
  int64_t epoch = 0;
  int64_t consumed = 0;  // samples of this epoch taken by all ranks together
  std::string stream;    // the position of a stream (dataset.h); empty: none

  bool operator==(const Position&) const = default;
};

/// Dataset indices for training and for measuring accuracy, each ascending.
struct Split {
  std::vector<int64_t> train;
  std::vector<int64_t> holdout;
};

/// The number of held-out samples for a share of `holdout` (in [0, 1)): rounded
/// to nearest, but at least 1 sample on each side unless holdout is 0.
int64_t num_holdout(int64_t num_samples, double holdout);

/// Holds out the last num_holdout() samples of a shuffle by `seed`.
Split split_samples(int64_t num_samples, double holdout, uint64_t seed);

/// The order of an epoch: `samples`, shuffled by (seed, epoch) or as they are.
std::vector<int64_t> epoch_order(
    std::vector<int64_t> samples, uint64_t seed, int64_t epoch, bool shuffle);

/// The number of samples of each source in an epoch of `total`: in proportion
/// to `weights` (positive), rounded so that they add up (largest remainders,
/// the first source on a tie). Throws ConfigError when a source would get none.
std::vector<int64_t>
blend_counts(int64_t total, std::span<const double> weights);

/// The order of an epoch with `counts[s]` samples of source s. They are taken
/// from sources[s], shuffled by (seed, s, pass) and repeated, starting where
/// the previous epoch ended, so that every sample of a source comes once before
/// any comes again. The sources take turns: the first k samples have more than
/// k * counts[s] / total - 1 and less than k * counts[s] / total + 1 of source
/// s. Source: Baruah et al., "Proportionate progress", 1996: windows of
/// subtasks, here on one processor, by the earliest deadline.
std::vector<int64_t> blend_order(
    const std::vector<std::vector<int64_t>>& sources,
    std::span<const int64_t> counts, uint64_t seed, int64_t epoch,
    bool shuffle);

/// A rank's part of a global batch: [begin, end) of its samples.
struct Share {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  bool operator==(const Share&) const = default;
};

/// The ranks have consecutive slices in proportion to `rank_batch` (samples per
/// rank of a full batch; empty: equal shares), rounded so that they add up: of
/// n samples rank r has [floor(n * s(r) / s(R)), floor(n * s(r+1) / s(R))),
/// where s(r) is the sum of rank_batch before r. A batch of s(R) samples gives
/// each rank exactly its number; a shorter one may give some ranks none. Throws
/// ConfigError for a rank out of range, a negative number, or a sum of 0.
Share rank_share(
    int64_t batch_samples, int64_t rank, int64_t num_ranks,
    std::span<const int64_t> rank_batch = {});

}  // namespace echelon
