// A CPU and a GPU share out a model: the same training as on one device.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/parallel/placement/placed_network.h"
#include "tests/parallel/placement/lists.h"
#include "tests/support/parity.h"

namespace echelon::placement::placement_gpu_test {

constexpr uint64_t kSeed = 5;

template <class N>
parity::Record train(N& network, const torch::Tensor& input) {
  parity::Record record;
  torch::optim::SGD optimizer(
      network.parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    network.zero_grad();
    const auto scores = network.forward(input);
    const auto loss = at::cross_entropy_loss(
        scores, torch::arange(scores.size(0), scores.device()).remainder(10));
    loss.backward();
    parity::NamedTensors gradients;
    for (const auto& item : network.named_parameters()) {
      gradients[item.key()] = item.value().grad().cpu();
    }
    record.step(gradients, loss.template item<double>());
    optimizer.step();
  }
  for (const auto& item : network.named_parameters()) {
    record.parameters[item.key()] = item.value().detach().cpu();
  }
  return record;
}

TEST(PlacementGpu, CpuAndGpuEqualOneDevice) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  load_accelerator(DeviceKind::cuda);
  const torch::Device gpu("cuda:0");
  auto resnet = model_case("resnet18");
  // Norms over two or three values are ±1 plus noise, and so is what a ReLU
  // then cuts: other kernels' noise would be other gradients.
  resnet.input =
      torch::sin(torch::arange(16 * 3 * 16 * 16, torch::kFloat64) * 0.37)
          .view({16, 3, 16, 16});
  for (const auto& c : {resnet, skip_case(), tied_case()}) {
    SCOPED_TRACE(c.name);
    const auto whole = build_network(c.layers, 0, c.layers.size(), kSeed);
    const auto expected = train(*whole, c.input);
    for (const auto& devices : std::vector<std::vector<torch::Device>>{
             {torch::kCPU, gpu}, {gpu, torch::kCPU}, {gpu, gpu}}) {
      const auto placement = plan_placement(
          c.layers,
          {.devices = devices,
           .inputs = {{c.input.sizes().vec(), c.input.scalar_type()}}});
      timeline::Recorder recorder(0, 0, 1);
      recorder.begin_step(0);
      PlacedNetwork placed(c.layers, placement, kSeed);
      placed.set_recorder(&recorder);
      parity::expect_parity(expected, train(placed, c.input), 1e-9);
      EXPECT_EQ(recorder.take().size(), 3 * 2 * 2);
    }
  }
}

}  // namespace echelon::placement::placement_gpu_test
