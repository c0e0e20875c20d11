#include "echelon/parallel/data/data_parallel.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "echelon/error.h"
#include "tests/parallel/data/training.h"
#include "tests/support/error_text.h"

namespace echelon::data_parallel_test {

using nets::Conv;
using nets::Mlp;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;
using training::Plan;
using training::with_values;

/// A module that can be cloned.
struct CloneableNetImpl : torch::nn::Cloneable<CloneableNetImpl> {
  CloneableNetImpl() { reset(); }
  void reset() override {
    fc1 = register_module("fc1", torch::nn::Linear(6, 16));
    fc2 = register_module("fc2", torch::nn::Linear(16, 4));
  }
  Tensor forward(const Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(CloneableNet);

DataParallelOptions on_cpus(int replicas) {
  DataParallelOptions options;
  options.devices.assign(replicas, torch::kCPU);
  options.threads = 1;
  options.ddp = Plan().options;
  return options;
}

// Trains and compares every replica with one device.
template <class M>
void expect_parity(
    DataParallel<M>& parallel, const parity::Record& expected,
    const Plan& plan) {
  const int size = parallel.size();
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers(size);
  std::vector<parity::Record> records(size);
  parallel.run([&](auto& replica) {
    optimizers[replica.index] = std::make_unique<torch::optim::SGD>(
        training::optimizer_of(*replica.module));
  });
  for (int step = 0; step < plan.steps; ++step) {
    const auto [x, y] = training::batch_of(plan, step, 0);
    const double loss = parallel.step({x, y}, [](auto& net, auto& part) {
      return training::loss_sum(net(part[0]), part[1]);
    });
    parallel.run([&](auto& replica) {
      records[replica.index].step(*replica.module, loss);
      optimizers[replica.index]->step();
      optimizers[replica.index]->zero_grad();
    });
  }
  parallel.run(
      [&](auto& replica) { records[replica.index].end(*replica.module); });
  for (int i = 0; i < size; ++i) {
    SCOPED_TRACE("replica " + std::to_string(i));
    parity::expect_parity(expected, records[i], parity::kRounding);
  }
}

class Replicas : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Numbers, Replicas, testing::Values(1, 2, 3, 4));

TEST_P(Replicas, TrainLikeOneDevice) {
  const Plan plan{.batch = 13};
  const auto expected =
      training::on_one_device(with_values(CloneableNet(), 3), plan);
  DataParallel<CloneableNet> parallel(
      with_values(CloneableNet(), 3), on_cpus(GetParam()));
  expect_parity(parallel, expected, plan);
}

TEST_P(Replicas, BuiltByAFunction) {
  const Plan plan;
  const auto expected = training::on_one_device(with_values(Conv(), 3), plan);
  uint64_t seed = 3;  // only the first replica's values count
  DataParallel<Conv> parallel(
      [&] { return with_values(Conv(), seed++); }, on_cpus(GetParam()));
  expect_parity(parallel, expected, plan);
}

TEST(DataParallel, SharesMayDiffer) {
  const Plan plan{.batch = 13};
  const auto expected =
      training::on_one_device(with_values(CloneableNet(), 3), plan);
  auto options = on_cpus(3);
  options.shares = {1.0, 0.0, 2.5};
  DataParallel<CloneableNet> parallel(with_values(CloneableNet(), 3), options);
  std::vector<int64_t> sizes(3);
  const Tensor x = parity::random({13, 6}, 1);
  parallel.step({x}, [&](auto& net, auto& part) {
    sizes[net.group().rank()] = part[0].size(0);
    return net(part[0]).sum();
  });
  EXPECT_THAT(sizes, ElementsAre(4, 0, 9));
  parallel.run([](auto& replica) { replica.module->zero_grad(); });
  expect_parity(parallel, expected, plan);
}

TEST(DataParallel, ForwardEqualsTheModules) {
  auto net = with_values(CloneableNet(), 3);
  DataParallel<CloneableNet> parallel(net, on_cpus(3));
  const Tensor x = parity::random({7, 6}, 1);
  const Tensor y = parallel.forward(x);
  EXPECT_TRUE(torch::allclose(y, net(x), 1e-13));
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(parallel.module().get(), net.get());
}

TEST(DataParallel, EachReplicaHasAThread) {
  auto options = on_cpus(2);
  options.threads = 3;
  DataParallel<CloneableNet> parallel(with_values(CloneableNet(), 3), options);
  std::vector<std::thread::id> first(2), second(2);
  std::vector<int> compute(2);
  parallel.run([&](auto& replica) {
    first[replica.index] = std::this_thread::get_id();
    compute[replica.index] = at::get_num_threads();
  });
  parallel.run([&](auto& replica) {
    second[replica.index] = std::this_thread::get_id();
  });
  EXPECT_NE(first[0], first[1]);
  EXPECT_EQ(first, second);
  EXPECT_THAT(compute, ElementsAre(3, 3));
}

TEST(DataParallel, GradModeIsTheCallers) {
  DataParallel<CloneableNet> parallel(
      with_values(CloneableNet(), 3), on_cpus(2));
  const torch::NoGradGuard no_grad;
  parallel.run([](auto&) { EXPECT_FALSE(torch::GradMode::is_enabled()); });
}

TEST(DataParallel, TheFirstErrorOfAReplicaIsThrown) {
  DataParallel<CloneableNet> parallel(
      with_values(CloneableNet(), 3), on_cpus(3));
  const auto message = [&](auto body) {
    return error_text<DataError>([&] { parallel.run(body); });
  };
  // The others wait for replica 1 in a collective.
  EXPECT_THAT(
      message([](auto& replica) {
        if (replica.index == 1) throw DataError("planted");
        replica.world.group().barrier();
      }),
      "planted");
  EXPECT_THAT(message([](auto&) {}), "planted");
}

TEST(DataParallel, WrongOptionsAreErrors) {
  const auto message = [](const DataParallelOptions& options) {
    return error_text<ConfigError>(
        [&] { DataParallel<CloneableNet> parallel(CloneableNet(), options); });
  };
  EXPECT_THAT(message({.devices = {}}), HasSubstr("devices is empty"));
  EXPECT_THAT(
      message({.devices = {torch::Device("cuda:0"), torch::Device("cuda:0")}}),
      HasSubstr("device cuda:0 comes twice"));
  EXPECT_THAT(message({.shares = {1.0}}), HasSubstr("1 shares"));
  EXPECT_THAT(message({.shares = {0.0, 0.0}}), HasSubstr("not all of them 0"));
  EXPECT_THAT(
      message({.shares = {1.0, -1.0}}), HasSubstr("shares are numbers"));
  EXPECT_THAT(message({.threads = -1}), HasSubstr("threads=-1"));
  EXPECT_THAT(
      error_text<ConfigError>(
          [] { DataParallel<Mlp> parallel(Mlp(), on_cpus(2)); }),
      HasSubstr("give a function that builds one"));
}

TEST(DataParallel, SplitByShares) {
  EXPECT_THAT(split_by_shares(10, {1, 1, 1}), ElementsAre(3, 4, 3));
  EXPECT_THAT(split_by_shares(10, {3, 1}), ElementsAre(8, 2));
  EXPECT_THAT(split_by_shares(0, {3, 1}), ElementsAre(0, 0));
  EXPECT_THAT(split_by_shares(1, {1, 1, 1, 1}), ElementsAre(0, 1, 0, 0));
}

}  // namespace echelon::data_parallel_test
