#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <thread>

#include "echelon/counting/meta_mode.h"
#include "echelon/profiling/event_clock.h"
#include "echelon/timeline/recorder.h"
#include "tests/test_device/places.h"
#include "tests/test_device/runtime.h"

namespace echelon::device_test {

using namespace test_device;
using testing::HasSubstr;
using torch::Tensor;

Tensor random(std::vector<int64_t> sizes, torch::Dtype dtype = torch::kFloat) {
  return torch::randn(sizes, torch::TensorOptions().dtype(dtype));
}

/// Both to the bit.
void expect_same(const Tensor& on_test_device, const Tensor& on_cpu) {
  ASSERT_EQ(on_test_device.sizes(), on_cpu.sizes());
  const Tensor copied = on_test_device.cpu();
  EXPECT_TRUE(torch::equal(copied, on_cpu)) << copied << on_cpu;
}

class TestDevice : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(0);
    counting::detail::need_meta_kernels();
    take_reports();
    reset_counts(0);
  }
  void TearDown() override {
    drain(0);
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
  }
};

// What `network` computes, with its gradients, on both devices.
void compare(
    torch::nn::Module& network, const Tensor& input,
    const std::function<Tensor(const Tensor&)>& forward) {
  const auto run = [&](const torch::Device& place) {
    network.to(place);
    network.zero_grad();
    Tensor x =
        input.detach().to(place).requires_grad_(input.is_floating_point());
    forward(x).square().sum().backward();
    std::vector<Tensor> results;
    if (x.grad().defined()) results.push_back(x.grad().cpu());
    for (const auto& parameter : network.parameters()) {
      results.push_back(parameter.grad().cpu());
    }
    return results;
  };
  const auto there = run(device());
  const auto here = run(torch::kCPU);
  ASSERT_EQ(there.size(), here.size());
  for (size_t i = 0; i < here.size(); ++i) expect_same(there[i], here[i]);
}

TEST_F(TestDevice, ComputesWhatTheCpuDoesToTheBit) {
  namespace nn = torch::nn;
  nn::Sequential linear(
      nn::Linear(8, 16), nn::GELU(), nn::LayerNorm(nn::LayerNormOptions({16})),
      nn::Linear(16, 4), nn::Softmax(1));
  compare(*linear, random({5, 8}), [&](const Tensor& x) {
    return linear->forward(x);
  });
  nn::Sequential images(
      nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8),
      nn::ReLU(), nn::MaxPool2d(2), nn::AdaptiveAvgPool2d(1), nn::Flatten(),
      nn::Linear(8, 3));
  compare(*images, random({4, 3, 8, 8}), [&](const Tensor& x) {
    return images->forward(x);
  });
  nn::Embedding embedding(11, 8);
  compare(*embedding, torch::randint(11, {4, 6}), [&](const Tensor& x) {
    const Tensor h = embedding->forward(x).unsqueeze(1);
    return at::scaled_dot_product_attention(h, h, h, {}, 0.0, true);
  });
}

TEST_F(TestDevice, KeepsMemoryFormatsAndViews) {
  const Tensor x = random({2, 3, 4, 5});
  const Tensor there = x.to(device());
  expect_same(
      there.permute({0, 2, 3, 1}).contiguous(),
      x.permute({0, 2, 3, 1}).contiguous());
  const Tensor last = there.contiguous(torch::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(last.is_contiguous(torch::MemoryFormat::ChannelsLast));
  expect_same(
      last.narrow(1, 1, 2).sum({2, 3}),
      x.contiguous(torch::MemoryFormat::ChannelsLast)
          .narrow(1, 1, 2)
          .sum({2, 3}));
  expect_same(there.view(torch::kByte), x.view(torch::kByte));
  expect_same(torch::cat({there, there}, 1), torch::cat({x, x}, 1));
  expect_same(there.to(torch::kBFloat16) * 2, x.to(torch::kBFloat16) * 2);
}

TEST_F(TestDevice, RunsTheFusedOptimizer) {
  const auto run = [](const torch::Device& place) {
    torch::manual_seed(1);
    std::vector<Tensor> p{random({7}).to(place)}, g{random({7}).to(place)};
    std::vector<Tensor> m{torch::zeros_like(p[0])}, v{torch::zeros_like(p[0])};
    std::vector<Tensor> steps{torch::ones(
        {}, torch::TensorOptions().dtype(torch::kFloat).device(place))};
    at::_fused_adamw_(
        p, g, m, v, {}, steps, 1e-2, 0.9, 0.99, 0.01, 1e-8, false, false);
    return p[0].cpu();
  };
  expect_same(run(device()), run(torch::kCPU));
}

TEST_F(TestDevice, QueuesWorkAndCountsWaits) {
  Tensor x = torch::ones({16}, device());
  x.add_(1).mul_(3);
  EXPECT_EQ(counts(0).launches, 3);
  EXPECT_TRUE(counts(0).host_waits.empty());
  EXPECT_EQ(x.sum().item<float>(), 96);
  ASSERT_EQ(counts(0).host_waits.size(), 1);
  EXPECT_EQ(counts(0).host_waits[0].call, "item");
  x.cpu();
  torch::tensor({1.0F, 2.0F}).to(device());
  EXPECT_EQ(counts(0).host_waits.size(), 3);
  EXPECT_EQ(counts(0).copied_to_host_bytes, 64);
  EXPECT_EQ(counts(0).copied_to_device_bytes, 8);
  Tensor host = torch::empty({16}, torch::TensorOptions().pinned_memory(true));
  EXPECT_TRUE(host.is_pinned());
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(counts(0).host_waits.size(), 3);
  current().synchronize();
  EXPECT_EQ(host[0].item<float>(), 6);
}

// On a device that no other test of this file uses.
TEST_F(TestDevice, AnEndedStreamIsUsedAgainOnceTheHostKnowsThatItIsOver) {
  Device& device = device_of(6);
  const int stream = device.new_stream();
  device.launch(stream, {.name = "work"}, [] {});
  device.end_stream(stream);
  drain(6);  // it is over, and the host does not know
  EXPECT_NE(device.new_stream(), stream);
  device.wait(device.mark(stream), "");
  while (!device.idle(stream)) std::this_thread::yield();
  EXPECT_EQ(device.new_stream(), stream);
  EXPECT_NE(device.new_stream(), stream);
}

TEST_F(TestDevice, ReusesFreedBlocksAtOnceAndHasALimit) {
  Tensor x = torch::ones({1000}, device());
  const void* const address = x.const_data_ptr();
  x = Tensor();
  EXPECT_EQ(torch::ones({1000}, device()).const_data_ptr(), address);
  const auto all = options().memory_bytes;
  Tensor half = torch::empty(
      {all / 2}, torch::TensorOptions().dtype(torch::kByte).device(device()));
  EXPECT_THROW(
      torch::empty(
          {all}, torch::TensorOptions().dtype(torch::kByte).device(device())),
      c10::OutOfMemoryError);
  // What is cached for one stream is given back for another.
  half = Tensor();
  const c10::StreamGuard on_side(new_stream());
  half = torch::empty(
      {all / 2 + 1},
      torch::TensorOptions().dtype(torch::kByte).device(device()));
  EXPECT_GE(counts(0).peak_bytes, all / 2 + 1);
}

TEST_F(TestDevice, NamesAnOperatorThatItDoesNotHave) {
  const Tensor x = random({3, 3}).to(device());
  try {
    torch::linalg_eigvals(x);
    FAIL();
  } catch (const c10::NotImplementedError& error) {
    EXPECT_THAT(
        error.what_without_backtrace(), HasSubstr("aten::_linalg_eigvals"));
  }
}

TEST_F(TestDevice, KeepsAnErrorOfQueuedWork) {
  on_ranks(3, [](int rank, Groups&) {
    if (rank != 2) return;
    const auto place = device(2);
    const Tensor table = torch::ones({3, 2}, place);
    const Tensor index = torch::full(
        {1}, 7, torch::TensorOptions().dtype(torch::kLong).device(place));
    table.index_select(0, index);  // out of range: known later
    EXPECT_THROW(guard().synchronizeDevice(2), c10::Error);
    EXPECT_THROW(torch::ones({1}, place), c10::Error);
    clear_error(2);
  });
}

// The error is on its way already, and a destructor must not throw.
TEST_F(TestDevice, TheSpanOfAFailedDeviceIsLost) {
  on_ranks(4, [](int rank, Groups&) {
    if (rank != 3) return;
    timeline::Recorder recorder(rank, 0, 1, [] {
      return std::make_unique<profiling::EventClock>(torch::kPrivateUse1);
    });
    recorder.begin_step(0);
    const Tensor table = torch::ones({3, 2}, device(3));
    const auto long_dtype =
        torch::TensorOptions().dtype(torch::kLong).device(device(3));
    const Tensor index = torch::full({1}, 7, long_dtype);
    {
      const timeline::ScopedSpan span(
          &recorder, "compute", "forward", timeline::SpanKind::forward);
      table.index_select(0, index);
      EXPECT_THROW(guard().synchronizeDevice(3), c10::Error);
    }
    EXPECT_TRUE(recorder.take().empty());
    clear_error(3);
  });
}

using TestDeviceDeath = TestDevice;

TEST_F(TestDeviceDeath, HostAccessEndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        const Tensor x = torch::ones({4}, device());
        const float first =
            *static_cast<const volatile float*>(x.const_data_ptr());
        std::exit(first > 0 ? 0 : 1);
      },
      "the host touches memory of device 0");
}

// ------------------------------------------------------------- the backend

TEST_F(TestDevice, CollectivesHaveTheMannersOfNccl) {
  on_ranks(2, [](int rank, Groups& groups) {
    auto& group = groups.make("world");
    std::vector<Tensor> x{torch::full({4}, rank + 1.0, device(rank))};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    EXPECT_EQ(group.allreduce(x, options), nullptr);
    EXPECT_EQ(x[0].cpu()[0].item<float>(), 3);
    options.asyncOp = true;
    options.reduceOp = c10d::ReduceOp::AVG;
    const auto work = group.allreduce(x, options);
    ASSERT_NE(work, nullptr);
    work->wait();
    EXPECT_EQ(x[0].cpu()[0].item<float>(), 3);
    EXPECT_TRUE(work->isCompleted());

    Tensor all = torch::empty({2, 4}, device(rank));
    c10d::AllgatherOptions gather;
    gather.asyncOp = false;
    EXPECT_EQ(group._allgather_base(all, x[0], gather), nullptr);
    EXPECT_EQ(all.sum().item<float>(), 24);

    group.startCoalescing();
    std::vector<Tensor> out{torch::full({2}, 10.0 + rank, device(rank))};
    std::vector<Tensor> in{torch::empty({2}, device(rank))};
    EXPECT_EQ(group.send(out, 1 - rank, 0), nullptr);
    EXPECT_EQ(group.recv(in, 1 - rank, 0), nullptr);
    group.endCoalescing()->wait();
    EXPECT_EQ(in[0].cpu()[1].item<float>(), 11 - rank);

    c10d::BarrierOptions barrier;
    barrier.asyncOp = false;
    EXPECT_EQ(group.barrier(barrier), nullptr);

    std::vector<Tensor> here{torch::ones({1})};
    EXPECT_THROW(group.allreduce(here, options), c10::Error);
    group.shutdown();
  });
}

TEST_F(TestDevice, APairsFirstMessageWaitsForItsPeer) {
  on_ranks(2, [](int rank, Groups& groups) {
    auto& group = groups.make("pair", std::chrono::milliseconds(300));
    std::vector<Tensor> x{torch::ones({4}, device(rank))};
    // Rank 1 never comes, so rank 0 does not even return from send().
    if (rank != 0) return;
    EXPECT_THROW(group.send(x, 1, 0), std::exception);
  });
}

TEST_F(TestDevice, ALateRankLeavesTheWorkOpen) {
  on_ranks(2, [](int rank, Groups& groups) {
    auto& group = groups.make("world");
    std::vector<Tensor> x{torch::ones({4}, device(rank))};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    group.allreduce(x, options);  // connects
    drain(rank);
    options.asyncOp = true;
    if (rank == 1) groups.store().wait({"seen"});
    const auto work = group.allreduce(x, options);
    if (rank == 0) {
      work->wait();  // of the stream, not of the host
      EXPECT_FALSE(work->isCompleted());
      groups.store().set("seen", std::vector<uint8_t>{1});
    }
    drain(rank);
    EXPECT_TRUE(work->isCompleted());
  });
}

}  // namespace echelon::device_test
