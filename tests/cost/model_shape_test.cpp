// Parameters and operations of the catalogue against published counts.
#include "echelon/cost/model_shape.h"

#include <gmock/gmock.h>

#include "echelon/cost/model_catalogue.h"
#include "tests/support/error_text.h"

namespace echelon::cost::model_shape_test {

using ::testing::HasSubstr;

// The numbers of parameters are, to the element, those of the weights' files.
TEST(ModelShape, HasAsManyParametersAsTheWeights) {
  const std::pair<const char*, double> published[] = {
      {"gpt2", 124439808},
      {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200},
      {"llama2-7b", 6738415616},
      {"llama2-13b", 13015864320},
      {"llama2-70b", 68976648192},
      {"llama3-8b", 8030261248},
      {"llama3-70b", 70553706496},
      {"llama3.1-405b", 405853388800},
      {"llama3.2-1b", 1235814400},
      {"llama3.2-3b", 3212749824},
      {"mistral-7b", 7241732096},
      {"mixtral-8x7b", 46702792704},
      {"mixtral-8x22b", 140630071296},
      {"bloom-176b", 176247271424},
      {"qwen2.5-7b", 7615616512},
      {"qwen3-8b", 8190735360},
      {"qwen3-30b-a3b", 30532122624},
      {"resnet18", 11689512},
      {"resnet34", 21797672},
      {"resnet50", 25557032},
      {"resnet101", 44549160},
      {"resnet152", 60192808}};
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(find_model(name).num_parameters(), parameters) << name;
  }
}

// Rounded, as their papers say.
TEST(ModelShape, HasAsManyParametersAsThePaperSays) {
  struct Published {
    const char* name;
    double billions, active, tolerance;
  };
  const Published published[] = {
      {"gpt3-175b", 175, 175, 0.005},
      {"gpt3-13b", 13, 13, 0.02},
      {"megatron-1.7b", 1.7, 1.7, 0.03},
      {"megatron-3.6b", 3.6, 3.6, 0.02},
      {"megatron-7.5b", 7.5, 7.5, 0.01},
      {"megatron-18b", 18.4, 18.4, 0.005},
      {"megatron-39b", 39.1, 39.1, 0.005},
      {"megatron-76b", 76.1, 76.1, 0.005},
      {"megatron-145b", 145.6, 145.6, 0.005},
      {"megatron-310b", 310.1, 310.1, 0.005},
      {"megatron-530b", 529.6, 529.6, 0.005},
      {"megatron-1t", 1008, 1008, 0.005},
      {"mt-nlg-530b", 530, 530, 0.005},
      {"nemotron4-15b", 15.6, 15.6, 0.01},
      {"nemotron4-340b", 340, 340, 0.01},
      {"mixtral-8x7b", 46.7, 12.9, 0.005},
      {"mixtral-8x22b", 140.6, 39.1, 0.005},
      {"deepseek-v2-lite", 15.7, 2.7, 0.02},
      {"deepseek-v2", 236, 21.4, 0.005},
      {"deepseek-v3", 671, 37.5, 0.005},
      {"kimi-k2", 1026, 32.9, 0.01},
      {"qwen3-30b-a3b", 30.5, 3.35, 0.005},
      {"qwen3-235b-a22b", 235, 22.2, 0.005},
      {"gpt-oss-120b", 116.8, 5.7, 0.005},
      {"gpt-oss-20b", 20.9, 4.2, 0.01},
      {"grok1", 314, 84, 0.02},
      {"mpt-125m", 0.125, 0.125, 0.005},
      {"mpt-30b", 30, 30, 0.01},
      {"mpt-13b", 13, 13, 0.02},
      {"zb-gpt-6.2b", 6.2, 6.2, 0.01},
      {"zb-gpt-28.3b", 28.3, 28.3, 0.01}};
  for (const Published& one : published) {
    const ModelShape model = find_model(one.name);
    EXPECT_NEAR(
        model.num_parameters() / 1e9, one.billions,
        one.tolerance * one.billions)
        << one.name;
    EXPECT_NEAR(
        model.active_parameters() / 1e9, one.active, one.tolerance * one.active)
        << one.name;
  }
}

// arXiv:2104.04473, equation 3, which computes forward twice: 96 B s l h^2
// (1 + s/6h + V/16lh); without the second one three quarters of it, of blocks.
TEST(ModelShape, ComputesWhatMegatronsFormulaSays) {
  for (const char* name : {"megatron-1.7b", "gpt3-175b", "megatron-1t"}) {
    const ModelShape model = find_model(name);
    const auto& shape = *model.transformer;
    const double s = 2048, l = static_cast<double>(shape.layers),
                 h = static_cast<double>(shape.hidden),
                 v = static_cast<double>(shape.vocab);
    const double formula =
        72 * s * l * h * h * (1 + s / (6 * h) + v / (12 * l * h));
    EXPECT_NEAR(model.model_flops(2048, true), formula, 1e-9 * formula) << name;
    const double half = 72 * s * l * h * h * (s / (6 * h)) / 2;
    EXPECT_NEAR(model.model_flops(2048, false), formula - half, 1e-3 * half);
  }
}

// The expected numbers are MFLOPs and GFLOPs of a token, as sources print that
// count for themselves.
TEST(ModelShape, ComputesAsMuchAsOthersCount) {
  const ModelShape llama = find_model("llama3-70b");
  EXPECT_NEAR(llama.model_flops(8192, false) / 8192 / 1e9, 449, 1);
  EXPECT_NEAR(llama.model_flops(8192, true) / 8192 / 1e9, 481, 1.5);
  // 6 operations a weight that a token passes; the embedding is looked up.
  const ModelShape mixtral = find_model("mixtral-8x7b");
  const double weights = mixtral.active_parameters() - 32000.0 * 4096;
  EXPECT_NEAR(mixtral.model_flops(1, false), 6 * weights, 1e-3 * 6 * weights);
}

TEST(ModelShape, AttentionReachesAsFarAsItsWindow) {
  TransformerShape shape{.layers = 2, .hidden = 64, .heads = 4, .window = 3};
  EXPECT_EQ(attention_pairs(shape, 5, false, false), 15);
  EXPECT_EQ(attention_pairs(shape, 5, true, false), 1 + 2 + 3 + 3 + 3);
  EXPECT_EQ(attention_pairs(shape, 2, true, false), 3);
  EXPECT_EQ(attention_pairs(shape, 5, true, true), 25);
  shape.causal = false;
  EXPECT_EQ(attention_pairs(shape, 5, false, false), 25);
}

// First layers that are dense, and then one in so many with experts.
TEST(ModelShape, ExpertsAreInSomeLayers) {
  for (const int64_t first : {0, 1, 3, 9}) {
    for (const int64_t every : {1, 2, 3}) {
      TransformerShape shape{.layers = 7};
      shape.experts = {
          .experts = 4, .first_dense_layers = first, .every = every};
      int64_t count = 0;
      for (int64_t i = 0; i < shape.layers; ++i) count += shape.has_experts(i);
      EXPECT_EQ(shape.expert_layers(), count) << first << " " << every;
    }
  }
}

TEST(ModelShape, OfImagesCostsWhatItsPaperSays) {
  const std::pair<const char*, double> multiplications[] = {
      {"resnet18", 1.8e9}, {"resnet34", 3.6e9}, {"resnet152", 11.5e9}};
  for (const auto& [name, macs] : multiplications) {
    double forward = 0;
    for (const auto& layer : find_model(name).layers)
      forward += layer.forward_flops;
    EXPECT_NEAR(forward / 2, macs, 0.03 * macs) << name;
  }
}

TEST(ModelShape, PoolingHandsOnAQuarterAndKeepsItsPlaces) {
  const auto layer = [](const char* model, size_t number) {
    return find_model(model).layers.at(number);
  };
  // 16 channels of 32 x 32, pooled to 16 x 16.
  const double cnn = 16 * 32 * 32;
  EXPECT_EQ(layer("simple_cnn", 0).output_elements, cnn / 4);
  EXPECT_EQ(
      layer("simple_cnn", 0).kept_elements, 3 * 32 * 32 + cnn + 2 * cnn / 4);
  const double stem = 64 * 112 * 112;
  EXPECT_EQ(layer("resnet18", 1).output_elements, stem / 4);
  EXPECT_EQ(layer("resnet18", 2).output_elements, 64 * 56 * 56);
  EXPECT_EQ(layer("resnet50", 2).output_elements, 256 * 56 * 56);
  // Normalisation and ReLU move the stem's output five times; then pooling
  // reads it and writes its own.
  EXPECT_EQ(
      layer("resnet18", 1).moved_elements, 5 * stem + stem + 3 * stem / 4);
}

TEST(ModelShape, ImagesMayBeAsSmallAsThePoolsAllow) {
  EXPECT_NO_THROW(convolution_shape("simple_cnn", {1, 4, 4}, 10));
  EXPECT_NO_THROW(convolution_shape("resnet18", {1, 1, 1}, 1));
  for (const ImageShape& image :
       {ImageShape{1, 3, 4}, ImageShape{1, 4, 3}, ImageShape{0, 4, 4},
        ImageShape{3, 2, 2}}) {
    EXPECT_THAT(
        error_text([&] { convolution_shape("simple_cnn", image, 10); }),
        HasSubstr("4 pixels or more each way"));
  }
}

TEST(ModelCatalogue, EveryNameIsAModel) {
  for (const std::string& name : catalogue_names()) {
    const ModelShape model = find_model(name);
    EXPECT_EQ(model.name, name);
    EXPECT_NO_THROW(check(model)) << name;
    EXPECT_GT(model.model_flops(0, false), 0) << name;
    EXPECT_LE(model.active_parameters(), model.num_parameters()) << name;
  }
}

TEST(ModelCatalogue, NamesTheNearest) {
  for (const auto& [name, said] :
       {std::pair("lama3-8b", "did you mean \"llama3-8b\""),
        std::pair("GPT3-175B", "did you mean \"gpt3-175b\""),
        std::pair("", "is not known"),
        std::pair("./nothing.json", "there is no such file")}) {
    EXPECT_THAT(error_text([&] { find_model(name); }), HasSubstr(said));
  }
}

TEST(ModelShape, ImpossibleNumbersAreRefused) {
  const std::pair<void (*)(TransformerShape&), const char*> cases[] = {
      {[](auto& shape) { shape.layers = 0; }, "layers is 0"},
      {[](auto& shape) { shape.kv_heads = 5; }, "32 heads share 5"},
      {[](auto& shape) { shape.hidden = 4097; }, "give head_dim"},
      {[](auto& shape) {
         shape.experts = {.experts = 4, .experts_per_token = 5, .ffn = 8};
       },
       "5 of 4 experts"}};
  for (const auto& [change, said] : cases) {
    ModelShape model = find_model("llama3-8b");
    change(*model.transformer);
    EXPECT_THAT(error_text([&] { check(model); }), HasSubstr(said));
  }
}

}  // namespace echelon::cost::model_shape_test
