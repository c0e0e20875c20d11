// Compares the counted networks with their layers as they run.
#include "echelon/train/strategies/count_job.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "echelon/architecture/language_model.h"
#include "echelon/job/check_job.h"
#include "echelon/predict/configured.h"

namespace echelon::counted_shape_test {

Job job_of(
    const std::string& model, const std::string& data,
    const std::string& layout = "") {
  const std::string text = "[model]\n" + model + "\n[data]\n" + data +
                           "\n[optimizer]\nname = \"adamw\"\n[train]\nbatch = "
                           "8\nsteps = 1\nrun = \"none\"\n" +
                           layout;
  return parse_job(text, "test.toml");
}

const std::string kImages =
    "name = \"dummy\"\nsamples = 16\nshape = [3, 64, 64]\nclasses = 10\n"
    "holdout = 0.0\n";

// The counted model has the loss as its last layer.
void expect_formula_counts(const Job& job) {
  const cost::ModelShape counted = counted_shape(job);
  const cost::ModelShape formula =
      predict::configured(job, check_job(job, job.layout.num_ranks())).model;
  ASSERT_EQ(formula.layers.size() + 1, counted.layers.size());
  EXPECT_EQ(counted.layers.back().name, "loss");
  EXPECT_EQ(counted.layers.back().parameters, 0);
  for (size_t i = 0; i < formula.layers.size(); ++i) {
    const cost::CountedLayer &expected = formula.layers[i],
                             &layer = counted.layers[i];
    SCOPED_TRACE(expected.name);
    EXPECT_EQ(expected.name, layer.name);
    EXPECT_EQ(expected.parameters, layer.parameters);
    EXPECT_EQ(expected.forward_flops, layer.forward_flops);
    EXPECT_EQ(expected.backward_flops, layer.backward_flops);
    EXPECT_EQ(expected.output_elements, layer.output_elements);
    EXPECT_EQ(expected.inner, layer.inner);
    EXPECT_EQ(expected.columns, layer.columns);
    EXPECT_EQ(expected.rows, layer.rows);
    // The statistics of normalisation are kept too; they do not grow with the
    // samples.
    EXPECT_NEAR(
        expected.kept_elements, layer.kept_elements,
        0.04 * layer.kept_elements + 1);
  }
}

TEST(CountedShape, FormulasOfImageNetworksAreWhatRuns) {
  for (const char* name : {"simple_cnn", "resnet18", "resnet50"}) {
    SCOPED_TRACE(name);
    expect_formula_counts(
        job_of("name = \"" + std::string(name) + "\"", kImages));
  }
}

TEST(CountedShape, FormulaOfThePerceptronIsWhatRuns) {
  expect_formula_counts(job_of("name = \"mlp\"\nhidden = [32, 16]", kImages));
}

// A gradient in the other memory order, from a flat layer or another stage, is
// copied before pooling's backward, which would otherwise copy its whole input.
TEST(CountedShape, PoolingGetsItsGradientsInTheOrderOfItsImages) {
  const cost::ModelShape model =
      counted_shape(job_of("name = \"simple_cnn\"", kImages));
  for (size_t i = 0; i < 2; ++i) {
    const cost::CountedLayer& layer = model.layers[i];
    SCOPED_TRACE(layer.name);
    const auto found = [&](const std::string& name) {
      return std::ranges::count(
          layer.backward, name, &cost::CountedOperator::name);
    };
    EXPECT_EQ(found("max_pool2d_with_indices_backward channels last"), 1);
    EXPECT_EQ(found("max_pool2d_with_indices_backward"), 0);
    // The bytes of 8 samples in float32: source, target, and the result of
    // copy_.
    const double output = 3 * 8 * 4 * layer.output_elements;
    double copied = 0;
    for (const cost::CountedOperator& one : layer.backward) {
      if (one.name == "copy_" && !one.for_weight) copied += one.bytes;
    }
    EXPECT_EQ(copied, output);
  }
}

double
sum(const std::vector<cost::CountedOperator>& operators, bool weights,
    double (*value)(const cost::CountedOperator&)) {
  double all = 0;
  for (const auto& one : operators) {
    if (one.for_weight == weights) all += value(one);
  }
  return all;
}

double flops(const cost::CountedOperator& one) {
  return 2.0 * static_cast<double>(one.count * one.m * one.n * one.k);
}

// Each operator's work adds up to the layer's, and half of backward is
// weights'.
TEST(CountedShape, OperatorsAddUp) {
  const cost::ModelShape model =
      counted_shape(job_of("name = \"mlp\"\nhidden = [32, 16]", kImages));
  for (size_t i = 0; i + 1 < model.layers.size(); ++i) {
    const cost::CountedLayer& layer = model.layers[i];
    SCOPED_TRACE(layer.name);
    EXPECT_EQ(layer.counted_samples, 8);
    EXPECT_DOUBLE_EQ(sum(layer.forward, false, flops), 8 * layer.forward_flops);
    EXPECT_DOUBLE_EQ(sum(layer.backward, true, flops), 8 * layer.forward_flops);
    EXPECT_DOUBLE_EQ(
        sum(layer.backward, false, flops),
        8 * (layer.backward_flops - layer.forward_flops));
  }
}

// A tensor of gradients each, of 32-bit elements: two are read, one is written.
TEST(CountedShape, GradientsAreAddedUp) {
  const cost::ModelShape model =
      counted_shape(job_of("name = \"mlp\"\nhidden = [32, 16]", kImages));
  for (size_t i = 0; i + 1 < model.layers.size(); ++i) {
    const cost::CountedLayer& layer = model.layers[i];
    SCOPED_TRACE(layer.name);
    std::vector<double> added;
    for (const auto& one : layer.backward) {
      if (!one.accumulates) continue;
      EXPECT_EQ(one.name, "add");
      EXPECT_TRUE(one.for_weight);
      added.push_back(one.bytes);
    }
    ASSERT_EQ(added.size(), 2u);  // weight and bias
    EXPECT_EQ(added[0] + added[1], 3 * 4 * layer.parameters);
  }
}

// 259 ids are no multiple of 128. On a GPU, the head's matmul takes zeros that
// lie behind the weight, and copies nothing.
TEST(CountedShape, GpusPadTheVocabularyInMemory) {
  const std::string path = testing::TempDir() + "/counted_shape.txt";
  std::ofstream(path) << std::string(4000, 'a');
  for (const char* tied : {"true", "false"}) {
    SCOPED_TRACE(tied);
    const cost::ModelShape model = counted_shape(job_of(
        "name = \"llama\"\nlayers = 1\nhidden_size = 32\nheads = 2\n"
        "intermediate_size = 64\n"
        "max_positions = 16\nvocab_size = 259\ntie_embeddings = " +
            std::string(tied),
        "name = \"text\"\nsources = [\"" + path + "\"]\nsequence = 8",
        "[precision]\ncompute = \"bf16\"\n[comm]\ndevice = \"cuda\"\n"
        "[layout]\nfsdp = 2\n"));
    int64_t padded = 0;
    for (const auto& layer : model.layers) {
      for (const auto* pass : {&layer.forward, &layer.backward}) {
        for (const auto& one : *pass) {
          EXPECT_EQ(one.name.find("pad"), std::string::npos) << one.name;
          padded += one.m == 384 || one.n == 384 || one.k == 384;
        }
      }
    }
    EXPECT_EQ(padded, 3);  // forward, and the gradients of x and the weight
  }
}

TEST(CountedShape, ConvolutionsAreMatmuls) {
  const cost::ModelShape model =
      counted_shape(job_of("name = \"simple_cnn\"", kImages));
  const auto& backward = model.layers[1].backward;
  const auto find = [&](cluster::ProductKind product) {
    return std::ranges::find(
        backward, std::optional(product), &cost::CountedOperator::product);
  };
  const auto inputs = find(cluster::ProductKind::convolution_inputs);
  const auto weights = find(cluster::ProductKind::convolution_weights);
  ASSERT_NE(inputs, backward.end());
  ASSERT_NE(weights, backward.end());
  EXPECT_TRUE(weights->for_weight);
  EXPECT_FALSE(inputs->for_weight);
  EXPECT_EQ(weights->m, 8 * 32 * 32);
  EXPECT_EQ(weights->n, 32);
  EXPECT_EQ(weights->k, 16 * 9);
  const auto named = [&](const std::string& name) {
    return std::find_if(backward.begin(), backward.end(), [&](const auto& one) {
      return one.name.starts_with(name) && !one.product;
    });
  };
  const auto bias = named("convolution_backward");
  ASSERT_NE(bias, backward.end());
  EXPECT_TRUE(bias->for_weight);
  EXPECT_EQ(bias->bytes, 8 * 32 * 32 * 32 * 4);
  EXPECT_NE(named("max_pool2d_with_indices_backward"), backward.end());
}

// Kernels of images are told apart by the order of their memory.
TEST(CountedShape, ChannelsLastImagesAreNamedSo) {
  for (const auto order :
       {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
    LayerList layers;
    layers.add(
        "pool", [] { return torch::nn::Identity(); },
        [order](auto&, const torch::Tensor& x) {
          return std::get<0>(
              at::max_pool2d_with_indices(x.contiguous(order), 2));
        });
    const cost::ModelShape model =
        counted_shape(layers, {{{2, 16, 8, 8}}}, 2, "ours");
    const bool last = order == torch::MemoryFormat::ChannelsLast;
    const std::string ending = last ? "channels last" : "_with_indices";
    bool found = false;
    for (const auto& one : model.layers[0].forward) {
      found |= one.name.starts_with("max_pool2d_with_indices") &&
               one.name.ends_with(ending);
    }
    EXPECT_TRUE(found) << ending;
  }
}

// A pass through memory: read and written once, of 32-bit elements.
TEST(CountedShape, MovedBytesAreThoseOfTheTensors) {
  LayerList layers;
  layers.add(
      "gelu", [] { return torch::nn::Identity(); },
      [](auto&, const torch::Tensor& x) { return at::gelu(x); });
  const cost::ModelShape model = counted_shape(layers, {{{4, 100}}}, 4, "ours");
  const auto& forward = model.layers[0].forward;
  const auto gelu = std::ranges::find(
      forward, std::string("gelu"), &cost::CountedOperator::name);
  ASSERT_NE(gelu, forward.end());
  EXPECT_EQ(gelu->bytes, 2 * 400 * 4);
  EXPECT_EQ(model.layers[0].moved_elements, 200);
}

TEST(CountedShape, TiedParametersCountOnce) {
  const auto path =
      std::filesystem::path(testing::TempDir()) / "counted_shape_test.txt";
  std::ofstream(path) << std::string(4096, 'x');
  const Job job = job_of(
      "name = \"gpt\"\nlayers = 2\nhidden_size = 32\nheads = 2\nmax_positions "
      "= 16",
      "name = \"text\"\nsources = [\"" + path.string() +
          "\"]\ntokenizer = \"bytes\"\nsequence = 16\nholdout = 0.0\n");
  const TrainingData data = open_data(job.data, job.train.seed);
  const ModelSource source = model_source(job, data.train->spec());
  double sum = 0;
  for (const auto& layer : counted_shape(job, source).layers)
    sum += layer.parameters;
  EXPECT_EQ(sum, static_cast<double>(source.num_parameters()));
}

// A published model is planned by the formulas of its shape, and a run by what
// its layers compute: the same parameters and the same products.
TEST(CountedShape, DeepseekIsTheModelOfTheFormulas) {
  const auto path =
      std::filesystem::path(testing::TempDir()) / "deepseek_test.txt";
  std::ofstream(path) << std::string(4096, 'x');
  for (const int64_t query_rank : {0, 20}) {
    SCOPED_TRACE(query_rank);
    // Values as wide as keys: a CPU's kernel takes no others.
    const Job job = job_of(
        "name = \"deepseek-v3\"\nlayers = 3\nhidden_size = 32\nheads = 4\n"
        "intermediate_size = 48\nmax_positions = 16\ndense_layers = 1\n"
        "experts = 8\nexperts_per_token = 2\nexpert_size = 24\n"
        "shared_experts = 2\nkey_value_rank = 12\nnope_size = 6\n"
        "rope_size = 4\nvalue_size = 10\nquery_rank = " +
            std::to_string(query_rank),
        "name = \"text\"\nsources = [\"" + path.string() +
            "\"]\ntokenizer = \"bytes\"\nsequence = 16\nholdout = 0.0\n");
    const TrainingData data = open_data(job.data, job.train.seed);
    const ModelSource source = model_source(job, data.train->spec());
    const cost::ModelShape counted = counted_shape(job, source);
    cost::ModelShape formula;
    formula.name = "deepseek-v3";
    formula.seq_len = 16;
    formula.transformer =
        transformer_shape(language_model_shape(job.model, source.classes));
    EXPECT_EQ(counted.num_parameters(), formula.num_parameters());
    double forward = 0;
    for (const auto& layer : counted.layers) forward += layer.forward_flops;
    // The formulas leave out the weighted sum of two experts' results of 32
    // features, in two layers.
    forward -= 2.0 * 16 * 2 * 2 * 32;
    EXPECT_DOUBLE_EQ(3 * forward, formula.model_flops(16, true));
  }
}

// The same for models with windows in some blocks, and more norms.
TEST(CountedShape, GemmasAreTheModelsOfTheFormulas) {
  const auto path =
      std::filesystem::path(testing::TempDir()) / "gemma_test.txt";
  std::ofstream(path) << std::string(4096, 'x');
  for (const char* name : {"gemma", "gemma2", "gemma3"}) {
    SCOPED_TRACE(name);
    const bool windowed = std::string(name) != "gemma";
    const Job job = job_of(
        "name = \"" + std::string(name) +
            "\"\nlayers = 3\nhidden_size = 32\nheads = 4\nkv_heads = 2\n"
            "head_size = 10\nintermediate_size = 48\nmax_positions = 16" +
            (windowed ? "\nwindow = 4\nglobal_every = 2" : ""),
        "name = \"text\"\nsources = [\"" + path.string() +
            "\"]\ntokenizer = \"bytes\"\nsequence = 16\nholdout = 0.0\n");
    const TrainingData data = open_data(job.data, job.train.seed);
    const ModelSource source = model_source(job, data.train->spec());
    const cost::ModelShape counted = counted_shape(job, source);
    cost::ModelShape formula;
    formula.name = name;
    formula.seq_len = 16;
    formula.transformer =
        transformer_shape(language_model_shape(job.model, source.classes));
    EXPECT_EQ(counted.num_parameters(), formula.num_parameters());
    double forward = 0;
    for (const auto& layer : counted.layers) forward += layer.forward_flops;
    EXPECT_DOUBLE_EQ(3 * forward, formula.model_flops(16, true));
    // Two blocks of three reach four tokens back.
    const double causal = formula.model_flops(16, false);
    const double pairs =
        windowed ? 2 * (4 * 5 / 2 + 12 * 4) + 16 * 17 / 2 : 3 * 16 * 17 / 2;
    EXPECT_DOUBLE_EQ(
        3 * forward - causal, 3 * (3 * 16 * 16 - pairs) * 2 * 4 * (10 + 10));
  }
}

// The kernels of one pass, and its collectives.
std::pair<int64_t, int64_t>
kernels_of(const std::vector<cost::CountedOperator>& pass) {
  std::pair<int64_t, int64_t> sum;
  for (const auto& one : pass) {
    if (one.accumulates) continue;
    (one.collective ? sum.second : sum.first) += one.launches;
  }
  return sum;
}

// Counted by hand. Of gpt, forward: two norms, the second with a residual sum,
// four matmuls with their biases, the activation, attention and a residual sum;
// row-parallel layers add their bias after the all-reduce. Backward: eight
// matmuls, three sums for biases, two norms, which add the residual's gradient,
// three for attention, the activation, which sums for the fourth bias, and the
// gradients of queries, keys and values, joined. Of llama, whose parameters lie
// in flat buffers, forward: two norms, four matmuls (one for queries, keys and
// values, and one for gate and up), the rotation, attention, SwiGLU and a
// residual sum. Backward: eight matmuls, two norms, the rotation, three of
// attention, and SwiGLU: 25 kernels in both.
TEST(CountedShape, KernelsOfABlockAreThoseOfAGpu) {
  const auto path =
      std::filesystem::path(testing::TempDir()) / "kernels_test.txt";
  std::ofstream(path) << std::string(4096, 'x');
  struct Case {
    const char* model;
    int64_t tp, forward, backward;
  };
  for (const Case& one :
       {Case{"gpt", 1, 9, 18}, Case{"gpt", 2, 11, 18}, Case{"llama", 1, 10, 15},
        Case{"llama", 2, 10, 15}}) {
    SCOPED_TRACE(std::string(one.model) + ", tp=" + std::to_string(one.tp));
    const Job job = job_of(
        "name = \"" + std::string(one.model) +
            "\"\nlayers = 2\nhidden_size = 32\nheads = 4\n"
            "max_positions = 16" +
            (one.model == std::string("llama") ? "\nintermediate_size = 64"
                                               : ""),
        "name = \"text\"\nsources = [\"" + path.string() +
            "\"]\ntokenizer = \"bytes\"\nsequence = 16\nholdout = 0.0\n",
        "[layout]\ntp = " + std::to_string(one.tp) +
            "\n[comm]\ndevice = \"cuda\"\n[precision]\ncompute = \"bf16\"\n");
    const cost::ModelShape model = counted_shape(job);
    EXPECT_EQ(model.layer_ranks, one.tp);
    const auto block = std::ranges::find_if(
        model.layers,
        [](const auto& layer) { return layer.name.ends_with(".1"); });
    ASSERT_NE(block, model.layers.end());
    const int64_t collectives = one.tp == 1 ? 0 : 2;
    EXPECT_EQ(
        kernels_of(block->forward), (std::pair(one.forward, collectives)));
    EXPECT_EQ(
        kernels_of(block->backward), (std::pair(one.backward, collectives)));
    for (const auto& call : block->forward) {
      // Activations of 8 samples of 16 tokens, in 16 bits.
      if (call.collective) {
        EXPECT_EQ(call.bytes, 8 * 16 * 32 * 2);
      }
      EXPECT_EQ(call.causal, call.product == cluster::ProductKind::attention);
    }
  }
}

// Matmuls run between the call of a collective and the wait for it: of another
// matrix, or of another chunk.
TEST(CountedShape, CollectivesHaveTheMatmulsBesideThem) {
  const auto path =
      std::filesystem::path(testing::TempDir()) / "beside_test.txt";
  std::ofstream(path) << std::string(4096, 'x');
  for (const int64_t chunks : {1, 2}) {
    SCOPED_TRACE(chunks);
    const Job job = job_of(
        "name = \"gpt\"\nlayers = 2\nhidden_size = 32\nheads = 4\n"
        "max_positions = 16",
        "name = \"text\"\nsources = [\"" + path.string() +
            "\"]\ntokenizer = \"bytes\"\nsequence = 16\nholdout = 0.0\n",
        "[layout]\ntp = 2\nsequence_parallel = true\noverlap_chunks = " +
            std::to_string(chunks) + "\n[comm]\ndevice = \"cuda\"\n");
    const cost::ModelShape model = counted_shape(job);
    const auto block = std::ranges::find_if(
        model.layers,
        [](const auto& layer) { return layer.name.ends_with(".1"); });
    ASSERT_NE(block, model.layers.end());
    // All collectives, and those beside a matmul.
    const auto counts = [](const auto& pass) {
      std::pair<int64_t, int64_t> found;
      for (const auto& one : pass) {
        if (!one.collective) continue;
        ++found.first;
        if (one.count > 0) ++found.second;
      }
      return found;
    };
    EXPECT_EQ(counts(block->forward), std::pair(4 * chunks, 4 * (chunks - 1)));
    // Of each region's three in backward, one has chunks.
    EXPECT_EQ(
        counts(block->backward),
        std::pair(2 * chunks + 4, 2 * (chunks - 1) + 4));
    for (const auto& one : block->forward) {
      if (!one.collective || one.count == 0) continue;
      EXPECT_EQ(one.count, 2);  // the rows of a chunk on each rank
      EXPECT_TRUE(one.one_weight);
      EXPECT_EQ(one.m, 8 * 16 / 4);  // 8 samples of 16 tokens
    }
  }
}

// Linear layers multiply in 8 bits, of matrices that are rounded once in a
// pass: inputs and weights, and in backward gradients too.
TEST(CountedShape, Fp8IsForLinearLayers) {
  const auto path = std::filesystem::path(testing::TempDir()) / "fp8_test.txt";
  std::ofstream(path) << std::string(4096, 'x');
  for (const char* name : {"gpt", "llama"}) {
    SCOPED_TRACE(name);
    const Job job = job_of(
        "name = \"" + std::string(name) +
            "\"\nlayers = 2\nhidden_size = 32\nheads = 4\n"
            "max_positions = 16\nintermediate_size = 64",
        "name = \"text\"\nsources = [\"" + path.string() +
            "\"]\ntokenizer = \"bytes\"\nsequence = 16\nholdout = 0.0\n",
        "[comm]\ndevice = \"cuda\"\n[precision]\ncompute = \"fp8\"\n");
    const cost::ModelShape model = counted_shape(job);
    for (const auto& layer : model.layers) {
      SCOPED_TRACE(layer.name);
      const auto counts = [&](const auto& pass, const char* op) {
        return std::ranges::count(pass, op, &cost::CountedOperator::name);
      };
      const bool block =
          layer.name.ends_with(".0") || layer.name.ends_with(".1");
      const int64_t products = block ? 4 : 0;
      EXPECT_EQ(counts(layer.forward, "fp8_mm_"), products);
      EXPECT_EQ(counts(layer.backward, "fp8_mm_"), 2 * products);
      EXPECT_EQ(counts(layer.forward, "to_fp8"), 2 * products);
      EXPECT_EQ(counts(layer.backward, "to_fp8"), 3 * products);
      EXPECT_EQ(counts(layer.forward, "mm"), layer.name == "lm_head" ? 1 : 0);
    }
    Job wide = job;
    wide.precision.compute = ComputeDtype::bf16;
    EXPECT_EQ(
        model.model_flops(16, true), counted_shape(wide).model_flops(16, true));
  }
}

TEST(CountedShape, StagesAreTheTrainers) {
  const cost::ModelShape model = counted_shape(job_of(
      "name = \"mlp\"\nhidden = [32, 16]\ncut = [\"fc3\"]", kImages,
      "[layout]\npp = 2\nmicrobatches = 4\n"));
  std::vector<int64_t> stages;
  for (const auto& layer : model.layers) stages.push_back(layer.stage);
  EXPECT_EQ(stages, (std::vector<int64_t>{0, 0, 1, 1}));
  EXPECT_EQ(model.layers[0].counted_samples, 2);
}

}  // namespace echelon::counted_shape_test
