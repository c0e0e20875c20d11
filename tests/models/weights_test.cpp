#include "echelon/models/weights.h"

#include <gmock/gmock.h>

#include "echelon/architecture/check_weights.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/error.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/models/make_network.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::weights_test {

using testing::AllOf;
using testing::HasSubstr;

std::shared_ptr<Network> make(
    const std::string& name, uint64_t seed,
    const std::string& dtype = "float32") {
  ModelOptions options;
  options.name = name;
  options.dtype =
      dtype == "float64" ? ModelDtype::float64 : ModelDtype::float32;
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

// What load_weights says of the file.
template <class Module>
std::string refused(Module& module, const std::string& path) {
  return error_text<DataError>([&] { load_weights(module, path); });
}

LayerList tied_list() {
  LayerList list;
  list.add("embed", [] { return torch::nn::Embedding(5, 3); });
  list.add("head", [] {
    return torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false));
  });
  list.tie("embed.weight", "head.weight");
  return list;
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
      refused(*single, path),
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
      refused(*network, path),
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
            path, list_parameters({.name = "simple_cnn"}, {3, 8, 8}, 10),
            "first.toml:3");
      }),
      HasSubstr("first.toml:3: does not fit the model in 4 places:\n"));
}

// Files of old PyTorch releases lack the counters.
TEST(Weights, BatchCountersMayBeMissing) {
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
      refused(*network, path),
      HasSubstr("\"layer1.0.bn1.running_var\" is missing"));
}

// A slice reads its layers' tensors from the whole model's file, and reports
// only those that do not fit.
TEST(Weights, ASliceReadsItsOwn) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto whole = make("resnet18", 1);
  save_weights(*whole, path);
  const auto list = model_layers({.name = "resnet18"}, {3, 8, 8}, 10);
  size_t count = 0;
  for (size_t begin = 0; begin < list.size(); begin += 4) {
    const auto slice = build_network(
        list, begin, std::min(begin + 4, list.size()), /*seed=*/2);
    load_weights(*slice, path);
    for (const auto& [name, tensor] : owned_tensors(*slice)) {
      ++count;
      const auto all = state_dict(*whole);
      const auto found = std::find_if(
          all.begin(), all.end(),
          [&name = name](const auto& item) { return item.first == name; });
      ASSERT_NE(found, all.end()) << name;
      EXPECT_TRUE(tensor.equal(found->second)) << name;
    }
  }
  EXPECT_EQ(count, state_dict(*whole).size());

  auto tensors = copy_of(*whole);
  for (auto& tensor : tensors) {
    if (tensor.first == "fc.bias") tensor.second = torch::zeros({3});
    if (tensor.first == "conv1.weight") tensor.first = "conv1.weigth";
  }
  tensors.emplace_back("stranger", torch::zeros({1}));
  save_tensors(path, tensors);
  const auto message = [&](size_t begin, size_t end) {
    const auto slice = build_network(list, begin, end);
    return refused(*slice, path);
  };
  EXPECT_EQ(
      message(0, 3),
      path +
          ": does not fit the model\n"
          "  \"conv1.weight\" is missing; the file has \"conv1.weigth\"\n"
          "  \"conv1.weigth\" is no tensor of the model\n"
          "  \"stranger\" is no tensor of the model");
  EXPECT_EQ(
      message(9, 11), path +
                          ": does not fit the model\n"
                          "  \"fc.bias\" has shape [3], the model needs [10]\n"
                          "  \"stranger\" is no tensor of the model");
}

// The file has one tensor for all slices that use it.
TEST(Weights, TiedParametersAreStoredOnce) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const LayerList list = tied_list();
  const auto weight = [](const Network& network) {
    return network.parameters()[0];
  };
  const auto whole = build_network(list, 0, 2, 1);
  const auto first = build_network(list, 0, 1, 2);
  const auto last = build_network(list, 1, 2, 2);
  ASSERT_EQ(owned_tensors(*whole).size(), 1u);
  EXPECT_EQ(owned_tensors(*whole)[0].first, "embed.weight");
  EXPECT_EQ(owned_tensors(*first).size(), 1u);
  EXPECT_EQ(owned_tensors(*last).size(), 0u);
  save_tensors(path, owned_tensors(*whole));
  load_weights(*first, path);
  load_weights(*last, path);
  EXPECT_TRUE(weight(*first).equal(weight(*whole)));
  EXPECT_TRUE(weight(*last).equal(weight(*whole)));

  // Other programs write it under the other name, or under both.
  const auto other = torch::rand({5, 3});
  save_tensors(path, {{"head.weight", other}});
  for (const auto& network : {whole, first, last}) {
    load_weights(*network, path);
    EXPECT_TRUE(weight(*network).equal(other));
  }
  save_tensors(path, {{"embed.weight", other}, {"head.weight", other.clone()}});
  load_weights(*last, path);
  save_tensors(path, {{"embed.weight", other}, {"head.weight", other + 1}});
  for (const auto& network : {whole, first, last}) {
    EXPECT_THAT(
        refused(*network, path),
        HasSubstr("\"embed.weight\" and \"head.weight\" differ, but are "
                  "tied"));
    EXPECT_TRUE(weight(*network).equal(other));
  }
  save_tensors(path, {{"head.weigh", other}});
  EXPECT_THAT(refused(*last, path), HasSubstr("\"embed.weight\" is missing"));
}

// Tied layers are filled too.
TEST(Weights, EachLayerIsFilledAsItIsBuilt) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto build = [&](const LayerList& list) {
    const LayerWeights weights(list, path);
    return build_network(
        list, 0, list.size(), /*seed=*/2, [&](NewLayer& layer) {
          weights.load(layer.index, layer.layer.module.get());
        });
  };
  const auto whole = make("resnet18", 1);
  save_weights(*whole, path);
  const auto list = model_layers({.name = "resnet18"}, {3, 8, 8}, 10);
  EXPECT_TRUE(same(*build(list), *whole));
  auto tensors = copy_of(*whole);
  tensors.back().first = "fc.bais";
  tensors.emplace_back("stranger", torch::zeros({1}));
  save_tensors(path, tensors);
  EXPECT_THAT(
      error_text<DataError>([&] { build(list); }),
      HasSubstr("\"stranger\" is no tensor of the model"));
  tensors.pop_back();
  save_tensors(path, tensors);
  EXPECT_THAT(
      error_text<DataError>([&] { build(list); }),
      HasSubstr("\"fc.bias\" is missing; the file has \"fc.bais\""));

  const LayerList tied = tied_list();
  const auto values = torch::rand({5, 3});
  for (const char* name : {"embed.weight", "head.weight"}) {
    save_tensors(path, {{name, values}});
    EXPECT_TRUE(build(tied)->parameters()[0].equal(values)) << name;
  }
  save_tensors(path, {{"embed.weight", values}, {"head.weight", values + 1}});
  EXPECT_THAT(
      error_text<DataError>([&] { build(tied); }),
      HasSubstr("\"embed.weight\" and \"head.weight\" differ, but are tied"));
}

// A rank reads its shards out of the full tensors.
class Part : public ShardedModule {
 public:
  explicit Part(const Shard& shard) { register_shard("weight", {shard}); }
};

TEST(Weights, ShardsAreRead) {
  const TempFolder folder;
  const std::string path = folder.path("w.safetensors");
  const auto whole = torch::arange(60, torch::kFloat32).view({6, 10});
  save_tensors(path, {{"weight", whole.to(torch::kBFloat16)}});
  for (const Shard& shard :
       {Shard{.shape = {6, 10}, .dim = 0, .pieces = {{1, 4}}},
        Shard{.shape = {6, 10}, .dim = 1, .pieces = {{0, 2}, {5, 9}}}}) {
    Part part(shard);
    load_weights(part, path);
    EXPECT_TRUE(part.parameters()[0].equal(slice_of(whole, shard)));
  }
  Part other({.shape = {3, 10}, .dim = 0, .pieces = {{0, 3}}});
  EXPECT_THAT(
      refused(other, path),
      HasSubstr("\"weight\" has shape [6, 10], the model needs [3, 10]"));
}

TEST(Weights, AMissingFileIsNamed) {
  const auto network = make("mlp", 1);
  EXPECT_THAT(
      error_text([&] { load_weights(*network, "no/such.safetensors"); }),
      HasSubstr("no/such.safetensors"));
}

}  // namespace echelon::weights_test
