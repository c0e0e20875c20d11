#include "echelon/data/loader.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "tests/support/error_text.h"

namespace echelon::loader_test {

using testing::ElementsAre;
using testing::HasSubstr;

/// Sample i is the number i, augmented to i + epoch / 10. Samples of `bad` are
/// broken. With a gate, loading waits until it is opened.
class Numbers : public Dataset {
 public:
  explicit Numbers(int64_t n) : n_(n) {}

  std::set<int64_t> bad;
  bool skip = false;
  bool foreign_error = false;
  bool memory = false;      // in_memory()
  bool takes_long = false;  // a sample: longer than quick batches

  int64_t size() const override { return n_; }
  SampleSpec spec() const override {
    return {.input_shape = {1}, .more = {{{2}, torch::kInt32}}};
  }
  bool may_skip() const override { return skip; }
  bool in_memory() const override { return memory; }
  void load(int64_t index, const SampleContext& context, const SampleMemory& to)
      const override {
    {
      std::unique_lock lock(mutex_);
      threads_.insert(std::this_thread::get_id());
      ++loads_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }
    if (takes_long) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (bad.contains(index)) {
      if (foreign_error) throw std::runtime_error("no memory");
      throw DataError("sample " + std::to_string(index) + " is broken");
    }
    const float value =
        static_cast<float>(index) + static_cast<float>(context.epoch) / 10.0f;
    std::memcpy(to.input, &value, sizeof(value));
    std::memcpy(to.target, &index, sizeof(index));
    const int32_t more[2] = {static_cast<int32_t>(index), -1};
    std::memcpy(to.more.at(0), more, sizeof(more));
  }

  void set_gate(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  void wait_for_loads(int64_t n) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return loads_ >= n; });
  }
  size_t threads() const {
    const std::lock_guard lock(mutex_);
    return threads_.size();
  }
  bool seen_by(std::thread::id thread) const {
    const std::lock_guard lock(mutex_);
    return threads_.contains(thread);
  }

 private:
  int64_t n_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::set<std::thread::id> threads_;
  mutable int64_t loads_ = 0;
  bool open_ = true;
};

std::vector<int64_t> first(int64_t n) {
  std::vector<int64_t> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

/// The first `n` samples in their order, in batches of 4.
LoaderOptions in_order(int64_t n) {
  return {.samples = first(n), .global_batch = 4, .shuffle = false};
}

/// The indices of the remaining batches of the epoch.
std::vector<std::vector<int64_t>> rest_of(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  while (auto batch = loader.next()) {
    EXPECT_EQ(
        batch->inputs.size(0), static_cast<int64_t>(batch->indices.size()));
    for (size_t i = 0; i < batch->indices.size(); ++i) {
      EXPECT_EQ(
          batch->targets[static_cast<int64_t>(i)].item<int64_t>(),
          batch->indices[i]);
      EXPECT_EQ(
          batch->more.at(0)[static_cast<int64_t>(i)][0].item<int64_t>(),
          batch->indices[i]);
    }
    batches.push_back(batch->indices);
  }
  return batches;
}

std::vector<int64_t> joined(const std::vector<std::vector<int64_t>>& batches) {
  std::vector<int64_t> all;
  for (const auto& batch : batches) {
    all.insert(all.end(), batch.begin(), batch.end());
  }
  return all;
}

TEST(Loader, FollowsTheOrderOfAnEpoch) {
  const Numbers data(10);
  Loader loader(data, {.samples = first(10), .global_batch = 4, .seed = 3});
  EXPECT_EQ(loader.batches_per_epoch(), 3);
  const auto batches = rest_of(loader);
  ASSERT_EQ(batches.size(), 3);
  EXPECT_EQ(batches[2].size(), 2);
  EXPECT_EQ(joined(batches), epoch_order(first(10), 3, 0, true));
  EXPECT_EQ(loader.next(), std::nullopt);
  EXPECT_EQ(loader.position(), (Position{0, 10}));
  loader.start_epoch(1);
  EXPECT_EQ(joined(rest_of(loader)), epoch_order(first(10), 3, 1, true));
}

TEST(Loader, WithoutShuffleAndLastBatch) {
  const Numbers data(20);
  Loader loader(
      data, {.samples = {2, 3, 5, 7, 11, 13, 17},
             .global_batch = 3,
             .shuffle = false,
             .drop_last = true});
  EXPECT_EQ(loader.batches_per_epoch(), 2);
  EXPECT_FALSE(loader.at_end());
  EXPECT_THAT(
      rest_of(loader),
      ElementsAre(ElementsAre(2, 3, 5), ElementsAre(7, 11, 13)));
  EXPECT_TRUE(loader.at_end());
  EXPECT_EQ(loader.position(), (Position{0, 6}));
  loader.seek({0, 3});
  EXPECT_FALSE(loader.at_end());
  loader.next();
  EXPECT_TRUE(loader.at_end());
}

TEST(Loader, AnyNumberOfRanksSeesTheSameGlobalBatches) {
  const Numbers data(50);
  const auto global = [&](int64_t ranks, std::vector<int64_t> rank_batch) {
    std::vector<std::vector<int64_t>> batches;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Loader loader(
          data, {.samples = first(50),
                 .global_batch = 12,
                 .rank = rank,
                 .num_ranks = ranks,
                 .rank_batch = rank_batch,
                 .seed = 9});
      size_t i = 0;
      while (auto batch = loader.next()) {
        batches.resize(std::max(batches.size(), i + 1));
        EXPECT_EQ(batch->global_count, i < 4 ? 12 : 2);
        batches[i].insert(
            batches[i].end(), batch->indices.begin(), batch->indices.end());
        ++i;
      }
      EXPECT_EQ(i, 5) << "every rank sees as many batches";
    }
    return batches;
  };
  const auto one = global(1, {});
  EXPECT_EQ(global(2, {}), one);
  EXPECT_EQ(global(3, {}), one);
  EXPECT_EQ(global(4, {}), one);
  EXPECT_EQ(global(2, {11, 1}), one);
  EXPECT_EQ(global(3, {0, 12, 0}), one);
}

// Batches that were loaded ahead for another division are loaded anew.
TEST(Loader, ABatchMayBeDividedAnewAtAnyTime) {
  for (const bool in_memory : {false, true}) {
    Numbers data(50);
    data.memory = in_memory;
    std::vector<std::vector<int64_t>> batches[2];
    std::vector<std::vector<int64_t>> sizes;
    for (const bool divided : {false, true}) {
      for (int64_t rank = 0; rank < 3; ++rank) {
        Loader loader(
            data, {.samples = first(50),
                   .global_batch = 12,
                   .rank = rank,
                   .num_ranks = 3,
                   .seed = 9});
        for (size_t i = 0; i < 10; ++i) {
          if (divided && i == 2) loader.divide({1, 9, 2});
          if (divided && i == 8) loader.divide({6, 1, 5});
          if (i == 5) loader.start_epoch(1);
          const auto batch = loader.next();
          ASSERT_TRUE(batch);
          auto& all = batches[divided];
          all.resize(std::max(all.size(), i + 1));
          all[i].insert(
              all[i].end(), batch->indices.begin(), batch->indices.end());
          if (divided && rank == 1) {
            sizes.push_back({static_cast<int64_t>(batch->indices.size())});
          }
        }
        EXPECT_FALSE(loader.next());
      }
    }
    EXPECT_EQ(batches[1], batches[0]) << in_memory;
    EXPECT_EQ(
        sizes, (std::vector<std::vector<int64_t>>{
                   {4}, {4}, {9}, {9}, {1}, {9}, {9}, {9}, {1}, {0}}));
  }
  const Numbers data(8);
  Loader loader(data, {.samples = first(8), .global_batch = 4, .num_ranks = 2});
  EXPECT_THROW(loader.divide({4}), ConfigError);
  EXPECT_THROW(loader.divide({0, 0}), ConfigError);
}

TEST(Loader, KeysDependOnSeedEpochAndSampleAlone) {
  Numbers data(20);
  const auto keys_of = [&](uint64_t seed, int64_t epoch, int64_t ranks) {
    std::map<int64_t, int64_t> keys;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Loader loader(
          data, {.samples = first(20),
                 .global_batch = ranks == 1 ? 7 : 12,
                 .rank = rank,
                 .num_ranks = ranks,
                 .seed = seed,
                 .sample_keys = true});
      loader.start_epoch(epoch);
      while (const auto batch = loader.next()) {
        EXPECT_EQ(batch->more.size(), 2);  // behind those of the data set
        EXPECT_EQ(batch->more.back().scalar_type(), torch::kInt64);
        const auto key = batch->more.back().accessor<int64_t, 1>();
        EXPECT_EQ(key.size(0), batch->inputs.size(0));
        for (int64_t i = 0; i < key.size(0); ++i) {
          keys[batch->indices[static_cast<size_t>(i)]] = key[i];
        }
      }
    }
    return keys;
  };
  const auto one = keys_of(1, 0, 1);
  EXPECT_EQ(keys_of(1, 0, 3), one);
  std::set<int64_t> different;
  for (const auto& all : {one, keys_of(1, 1, 1), keys_of(2, 0, 1)}) {
    for (const auto& [_, key] : all) different.insert(key);
  }
  EXPECT_EQ(different.size(), 60U);
  // The keys of broken samples are removed too.
  data.skip = true;
  data.bad = {3, 4, 11};
  const auto rest = keys_of(1, 0, 3);
  EXPECT_EQ(rest.size(), 17U);
  for (const auto& [index, key] : rest) EXPECT_EQ(key, one.at(index));
}

TEST(Loader, ARankMayGetNoSamplesOfTheLastBatch) {
  const Numbers data(5);
  Loader loader(
      data,
      {.samples = first(5), .global_batch = 4, .rank = 0, .num_ranks = 4});
  loader.next();
  const auto last = loader.next();
  ASSERT_TRUE(last);
  EXPECT_EQ(last->inputs.sizes(), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(last->global_count, 1);
  EXPECT_EQ(loader.next(), std::nullopt);
}

TEST(Loader, ResumesWithOtherRanksAndBatches) {
  const Numbers data(40);
  const auto order = epoch_order(first(40), 5, 2, true);
  Loader before(data, {.samples = first(40), .global_batch = 8, .seed = 5});
  before.start_epoch(2);
  before.next();
  before.next();
  EXPECT_EQ(before.position(), (Position{2, 16}));
  for (int64_t ranks : {1, 3}) {
    std::vector<std::vector<int64_t>> batches(4);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Loader after(
          data, {.samples = first(40),
                 .global_batch = 6,
                 .rank = rank,
                 .num_ranks = ranks,
                 .seed = 5});
      after.seek(before.position());
      for (auto& batch : batches) {
        const auto part = after.next()->indices;
        batch.insert(batch.end(), part.begin(), part.end());
      }
      EXPECT_EQ(after.position(), (Position{2, 40}));
    }
    EXPECT_EQ(
        joined(batches), std::vector<int64_t>(order.begin() + 16, order.end()));
  }
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        before.seek({0, 41});
      }),
      HasSubstr("position 41 of epoch 0 is outside of the 40"));
  before.seek({1, 40});
  EXPECT_EQ(before.next(), std::nullopt);
}

TEST(Loader, LeavesOutWindows) {
  for (const bool memory : {false, true}) {
    Numbers data(12);
    data.memory = memory;
    Loader loader(data, in_order(12));
    loader.leave_out({{0, 4}, {0, 8}});
    loader.start_epoch(0);
    EXPECT_THAT(
        rest_of(loader),
        ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(8, 9, 10, 11)));
    EXPECT_EQ(loader.position(), (Position{0, 12}));
    loader.seek({0, 4});
    EXPECT_EQ(loader.position(), (Position{0, 4}));
    EXPECT_EQ(loader.next()->indices, (std::vector<int64_t>{8, 9, 10, 11}));
    // Of two epochs, with the windows of more, which meet.
    loader.leave_out({{1, 8}, {2, 4}});
    loader.leave_out({{2, 4}, {2, 6}});
    loader.start_epoch(1);
    EXPECT_EQ(joined(rest_of(loader)), first(8));
    EXPECT_TRUE(loader.at_end());
    loader.start_epoch(2);
    EXPECT_THAT(
        rest_of(loader),
        ElementsAre(ElementsAre(6, 7, 8, 9), ElementsAre(10, 11)));
    loader.leave_out({{3, 0}, {4, 0}});
    loader.start_epoch(3);
    EXPECT_TRUE(loader.at_end());
    EXPECT_EQ(loader.next(), std::nullopt);
  }
}

// Its samples are those of the run before, whose batches were others.
TEST(Loader, EndsABatchBeforeAWindow) {
  const Numbers data(12);
  for (const bool drop_last : {false, true}) {
    auto options = in_order(12);
    options.drop_last = drop_last;
    Loader loader(data, options);
    loader.leave_out({{0, 6}, {0, 7}});
    loader.start_epoch(0);
    auto expected = std::vector<std::vector<int64_t>>{
        {0, 1, 2, 3}, {4, 5}, {7, 8, 9, 10}, {11}};
    if (drop_last) {
      expected = {{0, 1, 2, 3}, {7, 8, 9, 10}};
    }
    EXPECT_EQ(rest_of(loader), expected);
  }
}

TEST(Loader, AugmentsByEpochNotByThread) {
  const Numbers data(8);
  Loader loader(
      data, {.samples = first(8), .global_batch = 8, .shuffle = false});
  loader.start_epoch(5);
  EXPECT_NEAR(loader.next()->inputs[3].item<float>(), 3.5f, 1e-6);
}

TEST(Loader, SplitsABatchAmongItsWorkers) {
  Numbers data(8);
  data.set_gate(false);
  Loader loader(
      data,
      {.samples = first(8), .global_batch = 8, .workers = 3, .prefetch = 1});
  data.wait_for_loads(3);  // hangs if one worker had the whole batch
  data.set_gate(true);
  rest_of(loader);
  EXPECT_EQ(data.threads(), 3);
}

TEST(Loader, PrefetchesBatches) {
  Numbers data(100);
  Loader loader(
      data, {.samples = first(100), .global_batch = 10, .prefetch = 3});
  // Four batches are loaded before the first call of next(): the next one and
  // three more.
  data.wait_for_loads(40);
  loader.next();
  data.wait_for_loads(50);
}

// Threads would cost more than they save.
TEST(Loader, QuickBatchesAreLoadedByNext) {
  Numbers plain(50), quick(50);
  quick.memory = true;
  const LoaderOptions options{
      .samples = first(50), .global_batch = 4, .seed = 9};
  Loader by_threads(plain, options), by_next(quick, options);
  for (const int64_t epoch : {0, 1}) {
    by_threads.start_epoch(epoch);
    by_next.start_epoch(epoch);
    while (const auto expected = by_threads.next()) {
      const auto batch = by_next.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->indices, expected->indices);
      EXPECT_TRUE(batch->inputs.equal(expected->inputs));
      EXPECT_TRUE(batch->targets.equal(expected->targets));
      EXPECT_EQ(batch->global_count, expected->global_count);
      EXPECT_EQ(by_next.position(), by_threads.position());
    }
    EXPECT_EQ(by_next.next(), std::nullopt);
  }
  EXPECT_EQ(quick.threads(), 1u);
  EXPECT_TRUE(quick.seen_by(std::this_thread::get_id()));
  by_next.seek({1, 44});
  EXPECT_EQ(rest_of(by_next).size(), 2u);
}

TEST(Loader, SlowBatchesInMemoryAreLoadedByThreads) {
  Numbers slow(8);
  slow.memory = slow.takes_long = true;
  Loader loader(slow, {.samples = first(8), .global_batch = 4, .workers = 2});
  EXPECT_EQ(rest_of(loader).size(), 2u);
  // This thread has only measured how long a sample takes.
  EXPECT_EQ(slow.threads(), 3u);
}

// The time of the first sample decides.
TEST(Loader, ReportsABrokenFirstSampleWithItsBatch) {
  for (const bool foreign : {false, true}) {
    Numbers data(8);
    data.memory = true;
    data.bad = {0};
    data.foreign_error = foreign;
    Loader loader(data, in_order(8));
    EXPECT_ANY_THROW(loader.next());
    EXPECT_THAT(loader.next()->indices, ElementsAre(4, 5, 6, 7));
  }
}

TEST(Loader, QuickBatchesFailAndSkipAlike) {
  Numbers data(12);
  data.memory = true;
  data.bad = {5};
  Loader loader(data, in_order(12));
  EXPECT_TRUE(loader.next());
  EXPECT_EQ(
      error_text<DataError>([&] { loader.next(); }), "sample 5 is broken");
  EXPECT_THAT(loader.next()->indices, ElementsAre(8, 9, 10, 11));
  data.skip = true;
  loader.start_epoch(0);
  EXPECT_TRUE(loader.next());
  EXPECT_THAT(loader.next()->indices, ElementsAre(4, 6, 7));
}

TEST(Loader, NextThrowsErrorsOfWorkers) {
  Numbers data(12);
  data.bad = {5, 6};
  Loader loader(data, in_order(12));
  EXPECT_TRUE(loader.next());
  EXPECT_EQ(
      error_text<DataError>([&] { loader.next(); }), "sample 5 is broken");
  EXPECT_THAT(loader.next()->indices, ElementsAre(8, 9, 10, 11));
  data.foreign_error = true;
  loader.seek({0, 4});
  EXPECT_THROW(loader.next(), std::runtime_error);
}

TEST(Loader, SkipsAndCounts) {
  Numbers data(12);
  data.bad = {5, 6, 8, 9, 10, 11};
  data.skip = true;
  Loader loader(data, in_order(12));
  EXPECT_EQ(loader.next()->skipped, 0);
  const auto second = loader.next();
  EXPECT_THAT(second->indices, ElementsAre(4, 7));
  EXPECT_EQ(second->inputs.sum().item<float>(), 11.0f);
  EXPECT_EQ(second->more[0].sizes(), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(second->more[0].select(1, 0).sum().item<int64_t>(), 11);
  EXPECT_EQ(second->skipped, 2);
  EXPECT_THAT(second->skip_reasons[1], HasSubstr("sample 6"));
  EXPECT_EQ(second->global_count, 4);
  const auto third = loader.next();
  EXPECT_EQ(third->inputs.size(0), 0);
  EXPECT_EQ(third->skipped, 4);
  EXPECT_EQ(loader.position(), (Position{0, 12}));
}

TEST(Loader, BatchesBelongToTheCaller) {
  const Numbers data(400);
  Loader loader(
      data, {.samples = first(400),
             .global_batch = 4,
             .shuffle = false,
             .prefetch = 1});
  std::vector<torch::Tensor> kept;
  std::vector<float> values;
  while (auto batch = loader.next()) {
    // Every third batch is kept, complete or as a view.
    const auto n = batch->indices[0] / 4;
    if (n % 3 == 0) {
      kept.push_back(
          n % 2 == 0 ? batch->more[0] : batch->inputs.narrow(0, 1, 1));
      values.push_back(kept.back().sum().item<float>());
    }
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_EQ(kept[i].sum().item<float>(), values[i]);
  }
}

TEST(Loader, MayBeDestroyedAtAnyTime) {
  Numbers data(1000);
  for (int batches = 0; batches < 20; ++batches) {
    Loader loader(
        data, {.samples = first(1000), .global_batch = 16, .workers = 3});
    for (int i = 0; i < batches; ++i) {
      loader.next();
      if (i % 5 == 2) loader.start_epoch(i);
    }
  }
  // The loader is destroyed while workers load samples that nobody waits for.
  data.set_gate(false);
  auto loader = std::make_unique<Loader>(
      data, LoaderOptions{.samples = first(1000), .workers = 3});
  std::thread opener([&] { data.set_gate(true); });
  loader.reset();
  opener.join();
}

TEST(Loader, RefusesWrongArguments) {
  const Numbers data(4);
  const auto refused = [&](LoaderOptions options) {
    return error_text<ConfigError>([&] { Loader(data, options); });
  };
  EXPECT_THAT(refused({.global_batch = 0}), HasSubstr("global_batch"));
  EXPECT_THAT(refused({.workers = 0}), HasSubstr("workers"));
  EXPECT_THAT(refused({.prefetch = 0}), HasSubstr("prefetch"));
  EXPECT_THAT(refused({.samples = {4}}), HasSubstr("sample 4 is outside"));
  EXPECT_THAT(
      refused({.rank = 2, .num_ranks = 2}), HasSubstr("rank 2 is outside"));
  EXPECT_THAT(
      refused({.samples = first(4), .global_batch = 5, .drop_last = true}),
      HasSubstr("drop_last leaves nothing of 4 samples in batches of 5"));
  Loader empty(data, {.samples = {}});
  EXPECT_EQ(empty.next(), std::nullopt);
  EXPECT_EQ(empty.batches_per_epoch(), 0);
}

}  // namespace echelon::loader_test
