// A step asks nothing of the store through which ranks have found each other,
// so its server does not limit how many ranks a job may have.
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>

#include "echelon/comm/world_impl.h"
#include "echelon/train/trainer.h"
#include "tests/support/temp_folder.h"

namespace echelon::store_traffic_test {

// Counts what the threads of ranks ask for. Threads of backends are not
// counted: what they do depends on time, not on steps.
thread_local bool is_rank = false;

class CountingStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    count();
    return HashStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    count();
    return HashStore::add(key, value);
  }
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override {
    count();
    return HashStore::compareSet(key, expected, desired);
  }
  bool deleteKey(const std::string& key) override {
    count();
    return HashStore::deleteKey(key);
  }
  int64_t calls() const { return calls_; }

 private:
  void count() {
    if (is_rank) ++calls_;
  }
  std::atomic<int64_t> calls_ = 0;
};

int64_t
calls_of(int64_t steps, const Layout& layout, const BackendKind backend) {
  const TempFolder folder;
  Job job;
  job.model = {.name = "mlp", .hidden = {8, 8}};
  job.data.name = DataKind::digits;
  job.layout = layout;
  job.train.steps = steps;
  job.train.batch = 8;
  job.train.run = folder.path("run");
  job.train.timeline_steps = 2;  // travel through the store at the end
  job.train.watch_seconds = 0;
  job.checkpoint.at_end = false;
  job.train.log_every = 1;
  job.train.eval_every = 1000000;
  job.train.check_replicas_every = 1;
  job.comm.backend = backend;
  const auto store = c10::make_intrusive<CountingStore>();
  detail::run_ranks(
      static_cast<int>(layout.num_ranks()),
      [&](World& world) {
        is_rank = true;
        train(job, world, OwnParts());
      },
      job.comm, store);
  return store->calls();
}

TEST(StoreTraffic, IsNoneInAStep) {
  for (const auto backend : {BackendKind::local, BackendKind::gloo}) {
    for (const Layout& layout :
         {Layout{.dp_replicate = 3}, Layout{.dp_shard = 2},
          Layout{.dp_replicate = 2, .tp = 2}, Layout{.pp = 2}}) {
      const int64_t few = calls_of(3, layout, backend);
      EXPECT_GT(few, 10) << to_string(layout);
      EXPECT_EQ(calls_of(23, layout, backend), few)
          << to_string(layout) << " " << to_string(backend);
    }
  }
}

}  // namespace echelon::store_traffic_test
