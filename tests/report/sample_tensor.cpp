#include "tests/report/sample_tensor.h"

#include <algorithm>

#include "tests/report/sample_run.h"

namespace echelon::report::sample {
namespace {

constexpr int64_t kUs = 1000;

// Ranges of whole heads, each `size` features.
IndexRange heads_of(int64_t heads, int64_t rank, int64_t ranks, int64_t size) {
  const auto range = even_range(heads, rank, ranks);
  return {range.begin * size, range.end * size};
}

ParameterShards sharded(
    const std::string& name, std::vector<int64_t> shape, int64_t dim,
    const std::vector<std::vector<IndexRange>>& pieces) {
  ParameterShards parameter{.name = name};
  for (const auto& own : pieces) {
    parameter.parts.push_back(
        {.shape = shape, .dim = dim, .pieces = own, .owned = own});
  }
  return parameter;
}

ParameterShards even(
    const std::string& name, std::vector<int64_t> shape, int64_t dim,
    int64_t ranks) {
  ParameterShards parameter{.name = name};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parameter.parts.push_back(even_shard(shape, dim, rank, ranks));
  }
  return parameter;
}

ParameterShards
whole(const std::string& name, std::vector<int64_t> shape, int64_t ranks) {
  ParameterShards parameter{.name = name};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parameter.parts.push_back(replicated(shape, static_cast<int>(rank)));
  }
  return parameter;
}

LayerShards gpt_layer(const TensorShape& s, int64_t index) {
  const int64_t n = s.ranks;
  const int64_t size = s.hidden / s.heads;
  std::vector<std::vector<IndexRange>> fused, heads;
  for (int64_t rank = 0; rank < n; ++rank) {
    const auto own = heads_of(s.heads, rank, n, size);
    heads.push_back({own});
    fused.push_back({});
    for (int64_t part = 0; part < 3; ++part) {
      const int64_t from = part * s.hidden;
      fused.back().push_back({from + own.begin, from + own.end});
    }
  }
  return {
      "transformer.h." + std::to_string(index),
      {whole("ln_1.weight", {s.hidden}, n), whole("ln_1.bias", {s.hidden}, n),
       sharded("attn.c_attn.weight", {s.hidden, 3 * s.hidden}, 1, fused),
       sharded("attn.c_attn.bias", {3 * s.hidden}, 0, fused),
       sharded("attn.c_proj.weight", {s.hidden, s.hidden}, 0, heads),
       whole("attn.c_proj.bias", {s.hidden}, n),
       whole("ln_2.weight", {s.hidden}, n), whole("ln_2.bias", {s.hidden}, n),
       even("mlp.c_fc.weight", {s.hidden, s.intermediate}, 1, n),
       even("mlp.c_fc.bias", {s.intermediate}, 0, n),
       even("mlp.c_proj.weight", {s.intermediate, s.hidden}, 0, n),
       whole("mlp.c_proj.bias", {s.hidden}, n)}};
}

LayerShards llama_layer(const TensorShape& s, int64_t index) {
  const int64_t n = s.ranks;
  const int64_t size = s.hidden / s.heads;
  std::vector<std::vector<IndexRange>> queries, keys;
  for (int64_t rank = 0; rank < n; ++rank) {
    queries.push_back({heads_of(s.heads, rank, n, size)});
    const auto own = even_range(s.heads, rank, n);
    const int64_t group = s.heads / s.kv_heads;
    keys.push_back(
        {{own.begin / group * size, ((own.end - 1) / group + 1) * size}});
  }
  const int64_t kv = s.kv_heads * size;
  return {
      "model.layers." + std::to_string(index),
      {whole("input_layernorm.weight", {s.hidden}, n),
       sharded("self_attn.q_proj.weight", {s.hidden, s.hidden}, 0, queries),
       sharded("self_attn.k_proj.weight", {kv, s.hidden}, 0, keys),
       sharded("self_attn.v_proj.weight", {kv, s.hidden}, 0, keys),
       sharded("self_attn.o_proj.weight", {s.hidden, s.hidden}, 1, queries),
       whole("post_attention_layernorm.weight", {s.hidden}, n),
       even("mlp.gate_proj.weight", {s.intermediate, s.hidden}, 0, n),
       even("mlp.up_proj.weight", {s.intermediate, s.hidden}, 0, n),
       even("mlp.down_proj.weight", {s.hidden, s.intermediate}, 1, n)}};
}

TensorShards empty_shards(const TensorShape& s) {
  return {
      .ranks = s.ranks, .shards_tokens = s.shards_tokens, .tokens = s.tokens};
}

// What one rank does when; all ranks do the same.
struct Clock {
  timeline::Timeline& timeline;
  int32_t rank;
  int64_t step;
  int64_t now;

  void compute(const std::string& name, timeline::SpanKind kind, int64_t us) {
    timeline.spans.push_back(
        {rank, "compute", name, kind, now, now + us * kUs, step, 0, ""});
    now += us * kUs;
  }
  // Begun `earlier` than now; the rank waits for the rest.
  void call(
      const std::string& axis, const std::string& name, int64_t bytes,
      int64_t us, int64_t earlier = 0) {
    const int64_t begin = now - earlier * kUs;
    const int64_t end = begin + us * kUs;
    timeline.spans.push_back(
        {rank, "comm", name, timeline::SpanKind::communication, begin, end,
         step, bytes, axis});
    if (end <= now) return;
    timeline.spans.push_back(
        {rank, "compute", "wait for " + name, timeline::SpanKind::communication,
         now, end, step, 0, ""});
    now = end;
  }
};

// The products of a part of a layer, called as the trainer's are: matrices of
// one input share a name.
struct Part {
  const char* in;
  const char* out;
};

void forward_layer(
    Clock& clock, const TensorShards& model, const std::string& layer,
    const std::vector<Part>& parts, int64_t bytes) {
  for (const auto& part : parts) {
    const std::string in = layer + "." + part.in;
    const std::string out = layer + "." + part.out;
    if (model.shards_tokens) {
      clock.call("tp", "all_gather " + in + " gather", bytes / 2, 90);
    }
    clock.compute("forward " + layer, timeline::SpanKind::forward, 600);
    clock.call(
        "tp",
        model.shards_tokens ? "reduce_scatter " + out + " scatter"
                            : "all_reduce " + out + " sum",
        bytes, 140);
  }
}

}  // namespace

TensorShards gpt_shards(const TensorShape& s) {
  TensorShards result = empty_shards(s);
  result.layers.push_back(
      {"transformer.wte", {even("weight", {s.words, s.hidden}, 0, s.ranks)}});
  result.layers.push_back(
      {"transformer.wpe", {whole("weight", {1024, s.hidden}, s.ranks)}});
  for (int64_t i = 0; i < s.layers; ++i) {
    result.layers.push_back(gpt_layer(s, i));
  }
  result.layers.push_back(
      {"transformer.ln_f",
       {whole("weight", {s.hidden}, s.ranks),
        whole("bias", {s.hidden}, s.ranks)}});
  auto head = even("weight", {s.words, s.hidden}, 0, s.ranks);
  head.tied = true;
  result.layers.push_back({"lm_head", {head}});
  return result;
}

TensorShards llama_shards(const TensorShape& s) {
  TensorShards result = empty_shards(s);
  result.layers.push_back(
      {"model.embed_tokens",
       {even("weight", {s.words, s.hidden}, 0, s.ranks)}});
  for (int64_t i = 0; i < s.layers; ++i) {
    result.layers.push_back(llama_layer(s, i));
  }
  result.layers.push_back(
      {"model.norm", {whole("weight", {s.hidden}, s.ranks)}});
  result.layers.push_back(
      {"lm_head", {even("weight", {s.words, s.hidden}, 0, s.ranks)}});
  return result;
}

TensorShards uneven_shards() {
  return llama_shards(
      {.ranks = 4,
       .layers = 16,
       .hidden = 1920,
       .heads = 30,
       .kv_heads = 2,
       .intermediate = 5633,
       .words = 32001,
       .shards_tokens = true,
       .tokens = 4098});
}

TensorShards cnn_shards(int64_t ranks) {
  TensorShards result{.ranks = ranks};
  result.layers = {
      {"conv1",
       {even("weight", {16, 3, 3, 3}, 0, ranks), even("bias", {16}, 0, ranks)}},
      {"conv2",
       {even("weight", {32, 16, 3, 3}, 1, ranks), whole("bias", {32}, ranks)}},
      {"fc",
       {even("weight", {10, 8192}, 1, ranks), whole("bias", {10}, ranks)}}};
  return result;
}

ReportInput tensor_run(const TensorShards& model, const std::string& part) {
  ReportInput input = run({.steps = 300});
  input.timeline = {};
  input.tensor = model;
  const int64_t bytes = std::max<int64_t>(1, model.tokens) * 768 * 4;
  const bool gpt = part == "attn";
  const std::vector<Part> parts = {
      gpt ? Part{"attn.c_attn", "attn.c_proj"}
          : Part{"self_attn.qkv_proj", "self_attn.o_proj"},
      gpt ? Part{"mlp.c_fc", "mlp.c_proj"}
          : Part{"mlp.gate_up_proj", "mlp.down_proj"}};
  for (int32_t rank = 0; rank < model.ranks; ++rank) {
    input.timeline.rank_names.push_back(format("rank {} (cpu)", rank));
    int64_t now = 0;
    for (int64_t step = 0; step < 5; ++step) {
      Clock clock{input.timeline, rank, step, now};
      clock.compute("data wait", timeline::SpanKind::data, 150);
      const auto pass = [&](const char* name, timeline::SpanKind kind,
                            int64_t from) {
        input.timeline.spans.push_back(
            {rank, "compute", name, kind, from, clock.now, step, 0, ""});
      };
      const int64_t forward = clock.now;
      const std::string first = model.layers.front().name;
      clock.compute("forward " + first, timeline::SpanKind::forward, 100);
      clock.call("tp", "all_reduce " + first + " sum", bytes, 150);
      for (const auto& layer : model.layers) {
        if (layer.parameters.size() > 2) {
          forward_layer(clock, model, layer.name, parts, bytes);
        }
      }
      clock.call("tp", "all_gather lm_head loss", model.tokens * 8, 30);
      pass("forward", timeline::SpanKind::forward, forward);
      const int64_t backward = clock.now;
      for (auto it = model.layers.rbegin(); it != model.layers.rend(); ++it) {
        if (it->parameters.size() <= 2) continue;
        for (const auto& name : {parts[1], parts[0]}) {
          const std::string full = it->name + "." + name.in;
          clock.compute(
              "backward " + it->name, timeline::SpanKind::backward, 1250);
          if (model.shards_tokens) {
            clock.call(
                "tp", "all_gather " + it->name + "." + name.out + " gather",
                bytes / 2, 90, 60);
            clock.call(
                "tp", "all_gather " + full + " gather", bytes / 2, 90, 60);
            clock.call(
                "tp", "reduce_scatter " + full + " input gradient", bytes, 150,
                400);
          } else {
            clock.call(
                "tp", "all_reduce " + full + " input gradient", bytes, 150,
                rank == 0 ? 400 : 100);
          }
        }
      }
      for (int bucket = 0; bucket < 3; ++bucket) {
        clock.call(
            "dp_replicate", "all_reduce bucket " + std::to_string(bucket),
            25 << 20, 2000, 5000 - 1500 * bucket);
      }
      pass("backward", timeline::SpanKind::backward, backward);
      clock.compute("optimizer", timeline::SpanKind::optimizer, 900);
      clock.call("world", "all_reduce step sums", 48, 20);
      now = clock.now + 50 * kUs;
    }
  }
  return input;
}

}  // namespace echelon::report::sample
