#include "echelon/models/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "echelon/checkpoint/tensor_file.h"
#include "echelon/error.h"
#include "echelon/models/check_weights.h"
#include "echelon/models/network.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::shared_ptr<Network> make(
    const std::string& name,
    uint64_t seed,
    const std::string& dtype = "float32") {
  ModelOptions options;
  options.name = name;
  options.dtype = dtype;
  return make_network(options, {3, 8, 8}, 10, seed);
}

bool same(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto first = state_dict(a);
  const auto second = state_dict(b);
  bool equal = first.size() == second.size();
  for (size_t i = 0; equal && i < first.size(); ++i) {
    equal = first[i].first == second[i].first &&
            first[i].second.equal(second[i].second);
  }
  return equal;
}

std::vector<NamedTensor> copy_of(const Network& network) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : state_dict(network)) {
    tensors.emplace_back(name, tensor.detach().clone());
  }
  return tensors;
}

TEST(Weights, ComeBackBitForBit) {
  const TempFolder folder;
  for (const char* name : {"simple_cnn", "mlp", "resnet18", "resnet50"}) {
    const auto a = make(name, 1);
    a->forward(torch::rand({4, 3, 8, 8}));  // moves the running statistics
    const auto b = make(name, 2);
    EXPECT_FALSE(same(*a, *b));
    save_weights(*a, folder.path("w.safetensors"));
    load_weights(*b, folder.path("w.safetensors"));
    EXPECT_TRUE(same(*a, *b)) << name;
  }
}

TEST(Weights, WidenButDoNotNarrow) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto single = make("simple_cnn", 1);
  const auto dual = make("simple_cnn", 1, "float64");
  save_weights(*single, path);
  load_weights(*dual, path);
  const auto weight = dual->named_parameters()["fc.weight"];
  EXPECT_EQ(weight.scalar_type(), torch::kFloat64);
  EXPECT_TRUE(weight.equal(
      single->named_parameters()["fc.weight"].to(torch::kFloat64)));
  save_weights(*dual, path);
  EXPECT_THAT(
      error_text<DataError>([&] { load_weights(*single, path); }),
      HasSubstr("\"conv1.weight\" is F64, the model's float32 needs F32"));
}

TEST(Weights, EveryMismatchIsListedAndNothingChanges) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto network = make("simple_cnn", 1);
  const auto untouched = make("simple_cnn", 1);
  auto tensors = copy_of(*make("simple_cnn", 2));
  tensors[1].first = "conv1.biass";
  tensors[2].second = torch::zeros({1, 2});
  tensors[5].second = torch::zeros({10}, torch::kInt32);
  save_tensors(path, tensors);
  EXPECT_THAT(
      error_text<DataError>([&] { load_weights(*network, path); }),
      AllOf(
          HasSubstr(path + ": does not fit the model"),
          HasSubstr("\"conv1.bias\" is missing; the file has \"conv1.biass\""),
          HasSubstr("\"conv2.weight\" has shape [1, 2], the model needs [32, "
                    "16, 3, 3]"),
          HasSubstr("\"fc.bias\" is I32"),
          HasSubstr("\"conv1.biass\" is no tensor of the model")));
  EXPECT_TRUE(same(*network, *untouched));

  // Before any rank starts, from the plain list.
  EXPECT_THAT(
      error_text<DataError>([&] {
        check_weights(
            path,
            list_parameters({.name = "simple_cnn"}, {3, 8, 8}, 10),
            "first.toml:3");
      }),
      HasSubstr("first.toml:3: does not fit the model in 4 places:\n"));
}

// Files of old PyTorch releases lack the counters.
TEST(Weights, CountersOfBatchesMayBeMissing) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto network = make("resnet18", 1);
  auto tensors = copy_of(*make("resnet18", 2));
  std::erase_if(tensors, [](const NamedTensor& tensor) {
    return tensor.first.ends_with("num_batches_tracked");
  });
  ASSERT_EQ(tensors.size(), 102u);
  save_tensors(path, tensors);
  load_weights(*network, path);
  EXPECT_TRUE(same(*network, *make("resnet18", 2)));

  std::erase_if(tensors, [](const NamedTensor& tensor) {
    return tensor.first.ends_with("bn1.running_var");
  });
  save_tensors(path, tensors);
  EXPECT_THAT(
      error_text<DataError>([&] { load_weights(*network, path); }),
      HasSubstr("\"layer1.0.bn1.running_var\" is missing"));
}

TEST(Weights, AFileThatIsNotThereIsNamed) {
  const auto network = make("mlp", 1);
  EXPECT_THAT(
      error_text([&] { load_weights(*network, "no/such.safetensors"); }),
      HasSubstr("no/such.safetensors"));
}

}  // namespace
}  // namespace echelon
