#include "echelon/architecture/adapters.h"

#include <gmock/gmock.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "tests/support/error_text.h"

namespace echelon::adapters_test {

using testing::ElementsAre;
using testing::HasSubstr;

// Tensors of small whole numbers in memory.
class Memory : public TensorSource {
 public:
  void
  add(const std::string& name, const std::vector<int64_t>& shape,
      const std::vector<double>& values, const std::string& dtype = "F64") {
    facts_.push_back({name, dtype, shape});
    values_.push_back(values);
  }

  const std::string& path() const override { return path_; }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override {
    for (const auto& piece : pieces) {
      for (int64_t i = 0; i < piece.elements.size(); ++i) {
        const double value =
            values_[piece.tensor]
                   [static_cast<size_t>(piece.elements.begin + i)];
        const auto narrow = static_cast<float>(value);
        if (facts_[piece.tensor].dtype == "F32") {
          std::memcpy(piece.to + 4 * i, &narrow, 4);
        } else {
          std::memcpy(piece.to + 8 * i, &value, 8);
        }
      }
    }
  }

 private:
  std::string path_ = "memory";
  std::vector<TensorFacts> facts_;
  std::vector<std::vector<double>> values_;
};

std::shared_ptr<Memory> adapters() {
  auto source = std::make_shared<Memory>();
  source->add("h.lora_A.weight", {2, 3}, {1, 2, 3, 4, 5, 6});
  source->add("h.lora_B.weight", {2, 2}, {1, 10, 2, 20});
  return source;
}

std::vector<double>
part(TensorSource& source, size_t tensor, const IndexRange& elements) {
  std::vector<double> values(static_cast<size_t>(elements.size()));
  source.read(
      {{tensor, elements, reinterpret_cast<std::byte*>(values.data())}});
  return values;
}

TEST(AdaptedTensors, AddTheProductToAnyPieceOfTheMatrix) {
  const auto base = std::make_shared<Memory>();
  base->add("n.weight", {2}, {7, 8});
  // Its sums have the adapters' dtype.
  base->add("h.weight", {2, 3}, {100, 200, 300, 400, 500, 600}, "F32");
  base->add("h.bias", {2}, {1, 2});
  AdaptedTensors adapted(base, adapters(), 0.5, /*in_by_out=*/false);
  ASSERT_EQ(adapted.tensors().size(), 3u);
  EXPECT_EQ(adapted.tensors()[1].dtype, "F64");
  EXPECT_THAT(part(adapted, 0, {0, 2}), ElementsAre(7, 8));
  EXPECT_THAT(part(adapted, 2, {1, 2}), ElementsAre(2));
  // B A = [[41, 52, 63], [82, 104, 126]]
  EXPECT_THAT(
      part(adapted, 1, {0, 6}), ElementsAre(120.5, 226, 331.5, 441, 552, 663));
  EXPECT_THAT(part(adapted, 1, {2, 5}), ElementsAre(331.5, 441, 552));
}

TEST(AdaptedTensors, AddItsTransposeToMatricesOfGpt) {
  const auto base = std::make_shared<Memory>();
  base->add("h.weight", {3, 2}, {0, 0, 0, 0, 0, 0});
  AdaptedTensors adapted(base, adapters(), 1, /*in_by_out=*/true);
  EXPECT_THAT(part(adapted, 0, {0, 6}), ElementsAre(41, 82, 52, 104, 63, 126));
  EXPECT_THAT(part(adapted, 0, {3, 5}), ElementsAre(104, 63));
}

TEST(AdaptedTensors, OneSourceMayHaveBoth) {
  const auto both = adapters();
  both->add("h.weight", {2, 3}, {0, 0, 0, 0, 0, 0});
  AdaptedTensors adapted(both, both, 1, false);
  ASSERT_EQ(adapted.tensors().size(), 1u);
  EXPECT_THAT(part(adapted, 0, {0, 1}), ElementsAre(41));
}

TEST(AdaptedTensors, ABaseThatDoesNotFitIsRefused) {
  const auto base = std::make_shared<Memory>();
  const auto error = [&] {
    return error_text<DataError>(
        [&] { AdaptedTensors(base, adapters(), 1, false); });
  };
  EXPECT_THAT(error(), HasSubstr("the adapter of \"h\" does not fit"));
  base->add("h.weight", {3, 2}, {0, 0, 0, 0, 0, 0});
  EXPECT_THAT(error(), HasSubstr("the adapter of \"h\" does not fit"));
}

TEST(Peft, NamesAndConfiguration) {
  const auto tensors = peft_tensors(*adapters(), "F32");
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[1].name, "base_model.model.h.lora_B.weight");
  EXPECT_EQ(tensors[1].dtype, "F32");

  const ModelOptions llama{
      .name = "llama",
      .layers = 2,
      .hidden_size = 4,
      .heads = 2,
      .intermediate_size = 6,
      .max_positions = 8};
  const auto list = list_parameters(llama, {8}, 10);
  const auto config = nlohmann::json::parse(peft_config(
      {.rank = 4, .alpha = 8, .targets = {"*.[qv]_proj", "1.mlp.up_proj"}},
      "base", list, false));
  EXPECT_EQ(config["r"], 4);
  EXPECT_EQ(config["lora_alpha"], 8);
  EXPECT_EQ(config["base_model_name_or_path"], "base");
  EXPECT_EQ(config["fan_in_fan_out"], false);
  EXPECT_EQ(
      config["target_modules"],
      nlohmann::json({"model.layers.1.mlp.up_proj", "q_proj", "v_proj"}));
}

// By its last part, peft would give the experts adapters as well.
TEST(Peft, ASharedExpertHasItsCompleteName) {
  const ModelOptions deepseek{
      .name = "deepseek-v3",
      .layers = 2,
      .hidden_size = 4,
      .heads = 2,
      .intermediate_size = 6,
      .experts = 2,
      .experts_per_token = 1,
      .expert_size = 6,
      .shared_experts = 1,
      .dense_layers = 1,
      .key_value_rank = 3,
      .nope_size = 2,
      .rope_size = 2,
      .value_size = 2,
      .max_positions = 8};
  const auto config = nlohmann::json::parse(peft_config(
      {.rank = 4,
       .targets = {"0.mlp.up_proj", "shared_experts.up_proj", "o_proj"}},
      "base", list_parameters(deepseek, {8}, 10), false));
  EXPECT_EQ(
      config["target_modules"],
      nlohmann::json(
          {"model.layers.0.mlp.up_proj",
           "model.layers.1.mlp.shared_experts.up_proj", "o_proj"}));
}

}  // namespace echelon::adapters_test
