#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "echelon/comm/world.h"
#include "echelon/profiling/memory_meter.h"

namespace echelon::profiling::memory_meter_test {

constexpr int64_t kMiB = 1 << 20;

torch::Tensor mebibytes(int64_t count) {
  return torch::empty({count * kMiB}, torch::kByte);
}

// A meter that counts from the start of the test.
class CountingMeter : public testing::Test {
 protected:
  MemoryMeter meter;
  const std::unique_ptr<MemoryMeter::Counting> counting = meter.count();
};

TEST(MemoryMeter, CountsBlocksUntilTheyAreFreed) {
  MemoryMeter meter;
  const auto before = mebibytes(3);
  torch::Tensor kept;
  {
    const auto counting = meter.count();
    auto first = mebibytes(1);
    auto second = mebibytes(4);
    EXPECT_EQ(meter.now().total(), 5 * kMiB);
    EXPECT_EQ(meter.now()[timeline::MemoryKind::working], 5 * kMiB);
    first = torch::Tensor();
    EXPECT_EQ(meter.now().total(), 4 * kMiB);
    kept = second;
  }
  const auto after = mebibytes(8);
  EXPECT_EQ(meter.now().total(), 4 * kMiB);
  kept = torch::Tensor();
  EXPECT_EQ(meter.now().total(), 0);
  EXPECT_EQ(meter.peak().total(), 5 * kMiB);
}

TEST_F(CountingMeter, TheInnermostScopeSetsTheKind) {
  const MemoryKindScope outer(timeline::MemoryKind::parameters);
  const auto a = mebibytes(1);
  {
    const MemoryKindScope inner(timeline::MemoryKind::unsharded);
    const auto b = mebibytes(2);
    const auto c = mebibytes(4);
    set_memory_kind(b.narrow(0, 7, 9), timeline::MemoryKind::communication);
    EXPECT_EQ(meter.now()[timeline::MemoryKind::unsharded], 4 * kMiB);
    EXPECT_EQ(meter.now()[timeline::MemoryKind::communication], 2 * kMiB);
  }
  const auto d = mebibytes(8);
  EXPECT_EQ(meter.now()[timeline::MemoryKind::parameters], 9 * kMiB);
  EXPECT_EQ(meter.now().total(), 9 * kMiB);
  set_memory_kind(torch::Tensor(), timeline::MemoryKind::unsharded);
}

TEST_F(CountingMeter, PeakIsOneMoment) {
  {
    const MemoryKindScope scope(timeline::MemoryKind::unsharded);
    mebibytes(5);
  }
  const auto kept = mebibytes(3);
  EXPECT_EQ(meter.peak()[timeline::MemoryKind::unsharded], 5 * kMiB);
  EXPECT_EQ(meter.peak()[timeline::MemoryKind::working], 0);
  meter.reset_peak();
  EXPECT_EQ(meter.peak()[timeline::MemoryKind::unsharded], 0);
  EXPECT_EQ(meter.peak()[timeline::MemoryKind::working], 3 * kMiB);
}

TEST(MemoryMeter, BlocksThatOutliveForwardAreActivations) {
  torch::manual_seed(0);
  const int64_t bytes = 512 * 512 * 4;
  const auto weight = torch::randn({512, 512}).requires_grad_();
  const auto input = torch::randn({512, 512});
  MemoryMeter meter;
  const auto counting = meter.count();
  auto loss = (input.mm(weight).relu() * 2.0).sum();
  // The result of relu lives on: its backward reads it.
  EXPECT_EQ(meter.now()[timeline::MemoryKind::working] / bytes, 1);
  keep_as_activations();
  EXPECT_EQ(meter.now()[timeline::MemoryKind::working], 0);
  EXPECT_EQ(meter.now()[timeline::MemoryKind::activations] / bytes, 1);
  loss.backward();
  loss = torch::Tensor();
  EXPECT_EQ(meter.now()[timeline::MemoryKind::activations] / bytes, 0);
  EXPECT_EQ(
      meter.now()[timeline::MemoryKind::working] / bytes, 1);  // the gradient
  set_memory_kind(weight.grad(), timeline::MemoryKind::gradients);
  EXPECT_EQ(meter.now()[timeline::MemoryKind::gradients], bytes);
}

TEST(MemoryMeter, NewGradientsGetTheirKind) {
  const auto weight = torch::randn({512, 512}).requires_grad_();
  const auto input = torch::randn({8, 512});
  int calls = 0;
  name_gradients({weight});
  name_gradients({weight});  // hooks go on
  MemoryMeter meter;
  const auto counting = meter.count();
  weight.register_hook([&](const torch::Tensor&) { ++calls; });
  for (int round = 1; round < 3; ++round) {
    input.mm(weight).sum().backward();
    EXPECT_EQ(calls, round);
    EXPECT_EQ(meter.now()[timeline::MemoryKind::gradients], 512 * 512 * 4);
  }
}

TEST_F(CountingMeter, CountsFreesButNotBlocksOfOtherThreads) {
  auto made_here = mebibytes(2);
  torch::Tensor made_there;
  std::thread([&] {
    made_here = torch::Tensor();
    made_there = mebibytes(1);
  }).join();
  EXPECT_EQ(meter.now().total(), 0);
  made_there = torch::Tensor();
  EXPECT_EQ(meter.now().total(), 0);
}

TEST(MemoryMeter, EachRankOfAProcessHasItsOwn) {
  run_ranks(3, [](World& world) {
    MemoryMeter meter;
    const auto counting = meter.count();
    for (int round = 0; round < 200; ++round) {
      const auto block = mebibytes(1 + world.rank());
      ASSERT_EQ(meter.now().total(), (1 + world.rank()) * kMiB);
    }
    EXPECT_EQ(meter.now().total(), 0);
  });
}

TEST(MemoryMeter, InnerMetersCountAlone) {
  MemoryMeter outer;
  MemoryMeter inner;
  const auto counting = outer.count();
  {
    const auto within = inner.count();
    const auto block = mebibytes(1);
    EXPECT_EQ(inner.now().total(), kMiB);
    EXPECT_EQ(outer.now().total(), 0);
  }
  const auto block = mebibytes(1);
  EXPECT_EQ(outer.now().total(), kMiB);
}

TEST(MemoryMeter, ABlockMayOutliveItsMeter) {
  auto meter = std::make_unique<MemoryMeter>();
  auto counting = meter->count();
  auto block = mebibytes(1);
  counting.reset();
  meter.reset();
  block = torch::Tensor();
}

TEST(MemoryMeter, RefusesBlocksAboveItsLimit) {
  MemoryMeter meter;
  meter.limit(4 * kMiB);
  const auto kept = mebibytes(1);  // not counted
  const auto counting = meter.count();
  auto block = mebibytes(3);
  EXPECT_THROW(mebibytes(2), c10::OutOfMemoryError);
  EXPECT_EQ(meter.now().total(), 3 * kMiB);
  block = torch::Tensor();
  EXPECT_EQ(meter.at_shortage().total(), 3 * kMiB);
  mebibytes(4);
  meter.limit(0);
  mebibytes(9);
}

TEST_F(CountingMeter, SamplesRecordChanges) {
  const auto kept = mebibytes(1);
  meter.start_samples(kMiB);
  {
    const MemoryKindScope scope(timeline::MemoryKind::unsharded);
    const auto large = mebibytes(2);
    const auto small = torch::empty({100}, torch::kByte);
  }
  const auto samples = meter.take_samples();
  ASSERT_GE(samples.size(), 3u);
  EXPECT_EQ(samples.front().memory.total(), kMiB);
  EXPECT_EQ(samples[1].memory[timeline::MemoryKind::unsharded], 2 * kMiB);
  EXPECT_EQ(samples.back().memory.total(), kMiB);
  EXPECT_TRUE(
      std::ranges::is_sorted(samples, {}, &timeline::MemorySample::time_ns));
  mebibytes(5);
  EXPECT_TRUE(meter.take_samples().empty());
}

TEST_F(CountingMeter, ManySamplesKeepThePeak) {
  meter.start_samples(1);
  for (int round = 0; round < 10'000; ++round) {
    torch::empty({round == 4321 ? 5 * kMiB : kMiB}, torch::kByte);
  }
  const auto samples = meter.take_samples();
  EXPECT_LE(samples.size(), MemoryMeter::kMaxSamples + 1);
  const auto total = [](const auto& sample) { return sample.memory.total(); };
  EXPECT_EQ(total(*std::ranges::max_element(samples, {}, total)), 5 * kMiB);
}

TEST(MemoryMeterGpu, CountsBlocksOfItsDevice) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  const torch::Device device(torch::kCUDA, 0);
  MemoryMeter meter(device);
  const auto counting = meter.count();
  const auto host = mebibytes(3);
  {
    const MemoryKindScope scope(timeline::MemoryKind::gradients);
    const auto block = host.to(device);
    EXPECT_EQ(meter.now()[timeline::MemoryKind::gradients], 3 * kMiB);
    set_memory_kind(block, timeline::MemoryKind::activations);
    EXPECT_EQ(meter.now()[timeline::MemoryKind::activations], 3 * kMiB);
  }
  EXPECT_EQ(meter.now().total(), 0);
}

}  // namespace echelon::profiling::memory_meter_test
