// Sizes are those of the models' papers and configurations: GPT-2 (Radford et
// al., 2019), GPT-3 (arXiv:2005.14165, table 2.1), Megatron (arXiv:2104.04473,
// table 1), MT-NLG (arXiv:2201.11990), BLOOM (arXiv:2211.05100), Llama 2 and 3
// (arXiv:2307.09288, arXiv:2407.21783), Mixtral (arXiv:2401.04088), DeepSeek
// (arXiv:2405.04434, arXiv:2412.19437), Nemotron-4 (arXiv:2402.16819,
// arXiv:2406.11704), Zero Bubble (arXiv:2401.10241, table 3), and what the
// others published beside their weights. MPT: as its training configurations
// have it, with learned positions.
#include "echelon/cost/model_catalogue.h"

#include <algorithm>
#include <utility>

#include "echelon/architecture/hugging_face_config.h"
#include "echelon/architecture/language_model.h"
#include "echelon/error.h"
#include "echelon/text/nearest.h"

namespace echelon::cost {
namespace {

using Entry = std::pair<std::string, ModelShape>;

// A longer context than this is not what most of the training is done with.
constexpr int64_t kMostUsualTokens = 8192;

// One line of a family's table.
struct Size {
  const char* name;
  int64_t layers, hidden, heads;
  int64_t kv_heads = 0;
  int64_t ffn = 0;
};

// Sizes that [model] name trains.
void add_trained(
    std::vector<Entry>& models, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const ModelOptions options{.name = name};
    const LanguageModelShape shape =
        language_model_shape(options, vocabulary(options, 0));
    models.push_back(
        {name,
         {.transformer = transformer_shape(shape),
          .seq_len = std::min(shape.max_positions, kMostUsualTokens)}});
  }
}

// Learned positions, biases, the head tied: GPT-2's and what came of it.
void add_gpt(
    std::vector<Entry>& models, std::initializer_list<Size> sizes,
    int64_t vocab, int64_t seq_len) {
  for (const Size& size : sizes) {
    TransformerShape shape{
        .layers = size.layers,
        .hidden = size.hidden,
        .heads = size.heads,
        .ffn = size.ffn,
        .vocab = vocab,
        .positions = seq_len};
    models.push_back({size.name, {.transformer = shape, .seq_len = seq_len}});
  }
}

TransformerShape llama_shape(const Size& size, int64_t vocab) {
  return {
      .layers = size.layers,
      .hidden = size.hidden,
      .heads = size.heads,
      .kv_heads = size.kv_heads,
      .ffn = size.ffn,
      .vocab = vocab,
      .gated = true,
      .tied = false,
      .biases = false,
      .rms_norm = true};
}

void add_llama(
    std::vector<Entry>& models, std::initializer_list<Size> sizes,
    int64_t vocab, int64_t seq_len) {
  for (const Size& size : sizes) {
    models.push_back(
        {size.name,
         {.transformer = llama_shape(size, vocab), .seq_len = seq_len}});
  }
}

// `change` is given the shape of a llama of that size.
template <typename Change>
void add(
    std::vector<Entry>& models, const Size& size, int64_t vocab,
    int64_t seq_len, Change change) {
  TransformerShape shape = llama_shape(size, vocab);
  change(shape);
  models.push_back({size.name, {.transformer = shape, .seq_len = seq_len}});
}

void add_gpts(std::vector<Entry>& models) {
  add_trained(models, {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"});
  add_gpt(
      models,
      {{"gpt3-125m", 12, 768, 12},
       {"gpt3-350m", 24, 1024, 16},
       {"gpt3-760m", 24, 1536, 16},
       {"gpt3-1.3b", 24, 2048, 16},
       {"gpt3-2.7b", 32, 2560, 32},
       {"gpt3-5b", 24, 4096, 32},
       {"gpt3-6.7b", 32, 4096, 32},
       {"gpt3-13b", 40, 5120, 40},
       {"gpt3-175b", 96, 12288, 96}},
      50257, 2048);
  add_gpt(
      models,
      {{"megatron-1.7b", 24, 2304, 24},
       {"megatron-3.6b", 30, 3072, 32},
       {"megatron-7.5b", 36, 4096, 32},
       {"megatron-18b", 40, 6144, 48},
       {"megatron-39b", 48, 8192, 64},
       {"megatron-76b", 60, 10240, 80},
       {"megatron-145b", 80, 12288, 96},
       {"megatron-310b", 96, 16384, 128},
       {"megatron-530b", 105, 20480, 128},
       {"megatron-1t", 128, 25600, 160},
       {"mt-nlg-530b", 105, 20480, 128}},
      51200, 2048);
  add_gpt(
      models,
      {{"zb-gpt-1.5b", 22, 2304, 24},
       {"zb-gpt-6.2b", 30, 4096, 32},
       {"zb-gpt-14.6b", 46, 5120, 40},
       {"zb-gpt-28.3b", 62, 6144, 48}},
      50304, 1024);
  add_gpt(
      models,
      {{"mpt-125m", 12, 768, 12},
       {"mpt-350m", 24, 1024, 16},
       {"mpt-760m", 24, 1536, 12},
       {"mpt-1b", 24, 2048, 16},
       {"mpt-3b", 32, 2560, 20},
       {"mpt-7b", 32, 4096, 32},
       {"mpt-13b", 40, 5120, 40},
       {"mpt-30b", 48, 7168, 56},
       {"mpt-70b", 64, 8192, 64}},
      50368, 2048);
  add_gpt(models, {{"bloom-176b", 70, 14336, 112}}, 250880, 2048);
  models.back().second.transformer->positions = 0;
  models.back().second.transformer->embedding_norm = true;
}

void add_llamas(std::vector<Entry>& models) {
  add_trained(models, {"llama-160m"});
  add_llama(
      models,
      {{"llama2-7b", 32, 4096, 32, 32, 11008},
       {"llama2-13b", 40, 5120, 40, 40, 13824},
       {"llama2-70b", 80, 8192, 64, 8, 28672}},
      32000, 4096);
  add_llama(
      models,
      {{"llama3-8b", 32, 4096, 32, 8, 14336},
       {"llama3-70b", 80, 8192, 64, 8, 28672},
       {"llama3.1-8b", 32, 4096, 32, 8, 14336},
       {"llama3.1-70b", 80, 8192, 64, 8, 28672},
       {"llama3.1-405b", 126, 16384, 128, 8, 53248}},
      128256, 8192);
  add_trained(models, {"llama-8b", "llama-70b"});
  const auto tie = [](TransformerShape& shape) { shape.tied = true; };
  add(models, {"llama3.2-1b", 16, 2048, 32, 8, 8192}, 128256, 8192, tie);
  add_trained(models, {"llama-1b"});
  add(models, {"llama3.2-3b", 28, 3072, 24, 8, 8192}, 128256, 8192, tie);
  add(models, {"mistral-7b", 32, 4096, 32, 8, 14336}, 32000, 8192,
      [](TransformerShape& shape) { shape.window = 4096; });
  const auto plain = [](TransformerShape& shape) {
    shape.gated = shape.rms_norm = false;
  };
  add(models, {"nemotron3-8b", 32, 4096, 32, 32, 16384}, 256000, 4096, plain);
  add(models, {"nemotron3-22b", 40, 6144, 48, 48, 24576}, 256000, 4096, plain);
  add(models, {"nemotron4-15b", 32, 6144, 48, 8, 24576}, 256000, 4096, plain);
  add(models, {"nemotron4-340b", 96, 18432, 96, 8, 73728}, 256000, 4096, plain);
  add(models, {"qwen2.5-7b", 28, 3584, 28, 4, 18944}, 152064, 4096,
      [](TransformerShape& shape) { shape.qkv_biases = true; });
  for (const Size& size : std::initializer_list<Size>{
           {"qwen3-8b", 36, 4096, 32, 8, 12288},
           {"qwen3-14b", 40, 5120, 40, 8, 17408},
           {"qwen3-32b", 64, 5120, 64, 8, 25600}}) {
    add(models, size, 151936, 4096, [](TransformerShape& shape) {
      shape.head_dim = 128;
      shape.qk_norm = true;
    });
  }
}

void add_mixtures(std::vector<Entry>& models) {
  const auto of = [](ExpertShape experts) {
    return [experts](TransformerShape& shape) { shape.experts = experts; };
  };
  add(models, {"mixtral-8x7b", 32, 4096, 32, 8, 14336}, 32000, 4096,
      of({.experts = 8, .experts_per_token = 2, .ffn = 14336}));
  add(models, {"mixtral-8x22b", 56, 6144, 48, 8, 16384}, 32768, 4096,
      of({.experts = 8, .experts_per_token = 2, .ffn = 16384}));
  add(models, {"grok1", 64, 6144, 48, 8, 32768}, 131072, 8192,
      [](TransformerShape& shape) {
        shape.tied = true;
        shape.experts = {.experts = 8, .experts_per_token = 2, .ffn = 32768};
      });
  const auto qwen = [](int64_t ffn) {
    return [ffn](TransformerShape& shape) {
      shape.head_dim = 128;
      shape.qk_norm = true;
      shape.experts = {.experts = 128, .experts_per_token = 8, .ffn = ffn};
    };
  };
  add(models, {"qwen3-30b-a3b", 48, 2048, 32, 4, 6144}, 151936, 4096,
      qwen(768));
  add(models, {"qwen3-235b-a22b", 94, 4096, 64, 4, 12288}, 151936, 4096,
      qwen(1536));
  const auto gpt_oss = [](int64_t experts) {
    return [experts](TransformerShape& shape) {
      shape.head_dim = 64;
      shape.biases = true;
      shape.window = 128;
      shape.global_every = 2;
      shape.experts = {.experts = experts, .experts_per_token = 4, .ffn = 2880};
    };
  };
  add(models, {"gpt-oss-20b", 24, 2880, 64, 8, 2880}, 201088, 4096,
      gpt_oss(32));
  add(models, {"gpt-oss-120b", 36, 2880, 64, 8, 2880}, 201088, 4096,
      gpt_oss(128));
}

void add_deepseeks(std::vector<Entry>& models) {
  const auto of = [](int64_t query_rank, ExpertShape experts) {
    return [query_rank, experts](TransformerShape& shape) {
      shape.experts = experts;
      shape.latent = {
          .query_rank = query_rank,
          .key_value_rank = 512,
          .rope_dim = 64,
          .nope_dim = 128,
          .value_dim = 128};
    };
  };
  add(models, {"deepseek-v2-lite", 27, 2048, 16, 16, 10944}, 102400, 4096,
      of(0, {.experts = 64,
             .experts_per_token = 6,
             .ffn = 1408,
             .shared_ffn = 2816,
             .first_dense_layers = 1}));
  add(models, {"deepseek-v2", 60, 5120, 128, 128, 12288}, 102400, 4096,
      of(1536, {.experts = 160,
                .experts_per_token = 6,
                .ffn = 1536,
                .shared_ffn = 3072,
                .first_dense_layers = 1}));
  add(models, {"deepseek-v3", 61, 7168, 128, 128, 18432}, 129280, 4096,
      of(1536, {.experts = 256,
                .experts_per_token = 8,
                .ffn = 2048,
                .shared_ffn = 2048,
                .first_dense_layers = 3}));
  add(models, {"kimi-k2", 61, 7168, 64, 64, 18432}, 163840, 4096,
      of(1536, {.experts = 384,
                .experts_per_token = 8,
                .ffn = 2048,
                .shared_ffn = 2048,
                .first_dense_layers = 1}));
}

void add_convolutions(std::vector<Entry>& models) {
  for (const std::string& name : convolution_names()) {
    const bool small = name == "simple_cnn";
    models.push_back(
        {name, small ? convolution_shape(name, {3, 32, 32}, 10)
                     : convolution_shape(name, {3, 224, 224}, 1000)});
  }
}

const std::vector<Entry>& catalogue() {
  static const std::vector<Entry> models = [] {
    std::vector<Entry> all;
    add_gpts(all);
    add_llamas(all);
    add_mixtures(all);
    add_deepseeks(all);
    add_convolutions(all);
    for (auto& [name, model] : all) model.name = name;
    return all;
  }();
  return models;
}

bool looks_like_a_path(const std::string& text) {
  return text.find('/') != std::string::npos || text.ends_with(".json");
}

}  // namespace

const std::vector<std::string>& catalogue_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& [name, model] : catalogue()) all.push_back(name);
    return all;
  }();
  return names;
}

ModelShape
parse_hugging_face_config(std::string_view text, const std::string& name) {
  const auto config = hugging_face::parse_shape(text, name);
  const ModelShape model{
      .name = name,
      .transformer = config.shape,
      .seq_len = std::min(config.positions, kMostUsualTokens)};
  try {
    check(model);
  } catch (const ConfigError& error) {
    throw DataError(error.what());
  }
  return model;
}

ModelShape read_hugging_face_config(const std::filesystem::path& path) {
  std::error_code unreadable;
  const bool folder = std::filesystem::is_directory(path, unreadable);
  const auto file = folder ? path / "config.json" : path;
  return parse_hugging_face_config(
      hugging_face::read_config_text(file), file.string());
}

ModelShape find_model(const std::string& text) {
  for (const auto& [name, model] : catalogue()) {
    if (name == text) return model;
  }
  std::error_code unreadable;
  if (!text.empty() && std::filesystem::exists(text, unreadable)) {
    return read_hugging_face_config(text);
  }
  if (looks_like_a_path(text)) {
    throw ConfigError(
        "model \"" + text +
        "\": there is no such file or folder; name a Hugging Face config.json "
        "here, its folder, or a model such as gpt2, llama3-8b, mixtral-8x7b" +
        config::did_you_mean(
            text.substr(text.rfind('/') + 1), catalogue_names()));
  }
  throw ConfigError(
      "model \"" + text + "\": is not known" +
      config::did_you_mean(text, catalogue_names()) +
      "\nknown are names such as gpt2, llama3-8b, mixtral-8x7b, resnet50, and "
      "the "
      "path of a Hugging Face config.json");
}

}  // namespace echelon::cost
