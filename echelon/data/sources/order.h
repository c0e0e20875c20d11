// Which samples an epoch sees, in which order, and who takes which. None of it
// depends on the number of ranks: ranks cut slices out of one global order.
//
// Orders are Fisher-Yates shuffles driven by random.h, keyed by the seed (and
// the epoch), so they are the same on every platform.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace echelon {

/// How far a run has come in its data. Free of the number of ranks and of the
/// batch: a run goes on from it at other numbers of either.
struct Position {
  int64_t epoch = 0;
  int64_t consumed = 0;  // samples of this epoch taken by all ranks together

  bool operator==(const Position&) const = default;
};

/// Dataset indices for training and for measuring accuracy, each ascending.
struct Split {
  std::vector<int64_t> train;
  std::vector<int64_t> holdout;
};

/// Samples that `holdout` (in [0, 1)) of `num_samples` holds out: the nearest
/// whole number, but at least 1 sample each way unless holdout is 0.
int64_t num_holdout(int64_t num_samples, double holdout);

/// Holds out the last num_holdout() samples of a shuffle by `seed`.
Split split_samples(int64_t num_samples, double holdout, uint64_t seed);

/// The order of an epoch: `samples`, shuffled by (seed, epoch) or as they are.
std::vector<int64_t> epoch_order(
    std::vector<int64_t> samples, uint64_t seed, int64_t epoch, bool shuffle);

/// How many samples of each source an epoch of `total` takes: in proportion to
/// `weights` (positive), rounded so that they add up (largest remainders, the
/// first source on a tie). Throws ConfigError when a source would get none.
std::vector<int64_t>
blend_counts(int64_t total, std::span<const double> weights);

/// An epoch of several sources, `counts[s]` samples of source s: sources[s],
/// shuffled by (seed, s, pass) and repeated, from where the epoch before ended;
/// so each sample of a source comes once before one comes again. The sources
/// take turns: of any k samples at the front, source s has more than
/// k * counts[s] / total - 1 and less than k * counts[s] / total + 1.
/// Source: Baruah et al., "Proportionate progress", 1996: the windows of
/// subtasks; here of one processor, by the earliest deadline.
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

/// Slices of the ranks follow each other. With `rank_batch` (samples per rank
/// of a full batch; empty: equal ones) slices are in proportion to it, rounded
/// so that they add up: rank r has [floor(n * s(r) / s(R)), floor(n * s(r+1) /
/// s(R))) of n samples, s being the sum before r. A batch of s(R) samples gives
/// each rank exactly its number; a shorter one may give some ranks none.
/// Throws ConfigError for a rank outside, a negative number, or a sum of 0.
Share rank_share(
    int64_t batch_samples, int64_t rank, int64_t num_ranks,
    std::span<const int64_t> rank_batch = {});

}  // namespace echelon
