// Batches, prepared ahead by threads while the model computes; those that take
// less than handing them over, by the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "echelon/data/dataset.h"
#include "echelon/data/sources/order.h"

namespace echelon {

struct LoaderOptions {
  std::vector<int64_t> samples;     // dataset indices to use: of a Split, say
  int64_t global_batch = 64;        // samples per batch, over all ranks
  int64_t rank = 0;                 // this rank's data index ...
  int64_t num_ranks = 1;            // ... of so many shares
  std::vector<int64_t> rank_batch;  // samples per rank; empty: equal shares
  uint64_t seed = 0;
  bool shuffle = true;
  bool training = true;      // random crops and flips as the data set has them
  bool drop_last = false;    // leave out a last batch that is not full
  bool sample_keys = false;  // Batch::more ends with the samples' keys
  int64_t workers = 2;       // threads
  int64_t prefetch = 2;      // batches prepared ahead
  bool pin_memory = true;    // where there is a GPU to copy to
};

/// Walks the epochs of a data set. A global batch is the next global_batch
/// samples of the epoch's order (the last one may be smaller); this rank gets
/// its rank_share() of it. Threads load single samples, not batches, so one
/// batch is ready as soon as all of them together can make it. Where the data
/// lies in memory and a rank's part of a batch takes less than 50 us, there are
/// no threads, and next() loads it.
///
/// One thread uses a loader. It may be destroyed at any time; the samples that
/// are being loaded just then are finished first.
class Loader {
 public:
  /// `dataset` outlives the loader. Starts at epoch 0. Throws ConfigError, also
  /// when `drop_last` would leave no batch.
  Loader(const Dataset& dataset, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Begins epoch `epoch` at its first sample.
  void start_epoch(int64_t epoch);

  /// This rank's part of the next batch; nothing at the end of the epoch, and
  /// then start_epoch() goes on. The part has 0 samples when the last batch is
  /// too small for all ranks: every rank sees the same number of batches.
  /// Throws DataError that names the first broken sample of the batch; the
  /// batch is lost, a further call gives the one after it.
  ///
  /// The tensors are the caller's. Memory of a batch that nobody holds any more
  /// is used again for a later one.
  std::optional<Batch> next();

  /// After the batches that next() has returned; the same on all ranks.
  Position position() const;
  /// The epoch has no batch after them.
  bool at_end() const;
  /// Goes on from there, also from one saved with other ranks or batches.
  /// Throws ConfigError when it lies outside of the epoch.
  void seek(const Position& position);

  /// Calls of next() that an epoch answers with a batch.
  int64_t batches_per_epoch() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
