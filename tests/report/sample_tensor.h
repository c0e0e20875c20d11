// Made-up tensor-parallel runs, the same each time.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/report/report.h"

namespace echelon::report::sample {

struct TensorShape {
  int64_t ranks = 2;
  int64_t layers = 12;
  int64_t hidden = 768;
  int64_t heads = 12;
  int64_t kv_heads = 12;  // llama
  int64_t intermediate = 3072;
  int64_t words = 50257;
  bool shards_tokens = false;
  int64_t tokens = 1024;
};

/// GPT-2's shards as Hugging Face stores it: fused queries, keys and values,
/// [in, out], with input and output embeddings tied.
TensorShards gpt_shards(const TensorShape& shape);
/// Three matrices for queries, keys and values, fewer heads of keys than ranks
/// allowed, no biases, [out, in].
TensorShards llama_shards(const TensorShape& shape);
/// A llama whose sizes 4 ranks do not divide evenly, with its tokens sharded.
TensorShards uneven_shards();
/// Two convolutions and a linear layer.
TensorShards cnn_shards(int64_t ranks);

/// A run whose forward waits for its all-reduces, and whose backward hides
/// those of the inputs' gradients; with data parallelism's buckets at the end.
ReportInput
tensor_run(const TensorShards& model, const std::string& part = "attn");

}  // namespace echelon::report::sample
