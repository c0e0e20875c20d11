// Our models against torchvision's and Python's: the same weights give the same
// scores, gradients and running statistics, in both directions of exchange.
#include <gtest/gtest.h>

#include <iostream>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::models_pytorch_test {

const std::vector<int64_t> kImage = {3, 37, 34};

std::shared_ptr<Network>
make(const std::string& name, const std::string& dtype, uint64_t seed) {
  ModelOptions options;
  options.name = name;
  options.dtype =
      dtype == "float64" ? ModelDtype::float64 : ModelDtype::float32;
  options.hidden = {20, 15};
  return make_network(options, kImage, 10, seed);
}

torch::Tensor input() {
  return torch::sin(torch::arange(4 * 3 * 37 * 34, torch::kFloat64) * 0.37)
      .view({4, 3, 37, 34});
}

torch::Tensor targets() {
  return torch::tensor({1, 7, 0, 9}, torch::kInt64);
}

// The tensors that `run` of reference.py writes, from our network.
std::vector<NamedTensor> run(Network& network) {
  const auto x = input().to(network.parameters()[0].scalar_type());
  std::vector<NamedTensor> out;
  network.eval();
  out.emplace_back("eval", network.forward(x).detach());
  network.train();
  const auto logits = network.forward(x);
  const auto loss = at::cross_entropy_loss(logits, targets());
  loss.backward();
  out.emplace_back("train", logits.detach());
  out.emplace_back("loss", loss.detach());
  for (const auto& item : network.named_parameters()) {
    out.emplace_back("gradient." + item.key(), item.value().grad());
  }
  for (const auto& item : network.named_buffers()) {
    out.emplace_back("buffer." + item.key(), item.value());
  }
  return out;
}

// The largest difference, over the largest magnitude of each tensor.
double
difference(const std::vector<NamedTensor>& ours, const std::string& path) {
  double largest = 0.0;
  const auto theirs = load_tensors(path);
  EXPECT_EQ(theirs.size(), ours.size()) << path;
  for (const auto& [name, tensor] : ours) {
    if (tensor.scalar_type() == torch::kFloat32 &&
        name.starts_with("gradient.")) {
      continue;  // backward amplifies rounding: compared in float64 only
    }
    const auto other = load_tensors(path, {name})[0].to(torch::kFloat64);
    const auto scale = std::max(other.abs().max().item<double>(), 1e-3);
    const double error =
        (tensor.to(torch::kFloat64) - other).abs().max().item<double>() / scale;
    EXPECT_TRUE(std::isfinite(error)) << name;
    largest = std::max(largest, error);
  }
  return largest;
}

TEST(ModelsPytorch, OurWeightsGivePythonTheSameResults) {
  ECHELON_NEED_PYTHON();
  // The partition of sums over threads changes the fifth digit in float32.
  at::set_num_threads(1);
  const TempFolder folder;
  save_tensors(
      folder.path("input.safetensors"),
      {{"input", input()}, {"targets", targets()}});
  std::vector<std::pair<std::string, std::shared_ptr<Network>>> networks;
  for (const char* name : {"simple_cnn", "mlp", "resnet18", "resnet50"}) {
    for (const char* dtype : {"float32", "float64"}) {
      if (std::string(name) + dtype == "resnet50float32") continue;
      const std::string key = std::string(name) + "." + dtype;
      networks.emplace_back(key, make(name, dtype, 3));
      save_weights(
          *networks.back().second, folder.path(key + ".weights.safetensors"));
    }
  }
  run_python_script("models/reference.py", {"run", folder.path()});
  for (const auto& [key, network] : networks) {
    const double error =
        difference(run(*network), folder.path(key + ".out.safetensors"));
    EXPECT_LE(error, key.ends_with("64") ? 1e-12 : 1e-5) << key;
    std::cout << key << ": largest relative difference " << error << "\n";
  }
}

TEST(ModelsPytorch, WeightsOfTorchvisionLoad) {
  ECHELON_NEED_PYTHON();
  const TempFolder folder;
  const std::vector<std::string> names = {"resnet34", "resnet101"};
  std::vector<std::string> arguments = {"make", folder.path()};
  arguments.insert(arguments.end(), names.begin(), names.end());
  run_python_script("models/reference.py", arguments);
  for (const auto& name : names) {
    const std::string path = folder.path("fresh." + name + ".safetensors");
    const auto network = make(name, "float32", 3);
    load_weights(*network, path);
    const auto state = state_dict(*network);
    ASSERT_EQ(state.size(), load_tensors(path).size());
    for (const auto& [key, tensor] : state) {
      ASSERT_TRUE(tensor.equal(load_tensors(path, {key})[0])) << key;
    }
  }
}

}  // namespace echelon::models_pytorch_test
