// Language models as Hugging Face's transformers keep them: a folder with
// config.json and weights in safetensors files. Free of LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/models/language_model.h"
#include "echelon/models/options.h"
#include "echelon/models/weights_source.h"

namespace echelon::hugging_face {

/// The model of a config.json, every number set: name "gpt" for GPT2LMHeadModel,
/// "llama" for LlamaForCausalLM. Missing fields have transformers' defaults.
///
///   path  of the config.json
///
/// Throws DataError, with the field, its value and what is known, when the file is
/// missing or malformed, for another architecture, and for whatever these models
/// here do not compute: other activations, biases or scalings of llama, a
/// quantised model, dropouts that differ …
ModelOptions read_config(const std::string& path);

struct ConfigText {
  std::string dtype = "float32";
  std::optional<int64_t> end_of_text;  // a token's id
};

/// A config.json that transformers reads as the same model.
std::string
write_config(const LanguageModelShape& shape, const ConfigText& text = {});

/// A generation_config.json for it.
std::string generation_config(const ConfigText& text = {});

/// Which tensors go into which file: in their order, each file at most
/// `max_bytes`, except where a single tensor is larger.
///
///   bytes    of each tensor
///   returns  for each file the tensors [begin, end)
std::vector<std::pair<size_t, size_t>>
pack_shards(const std::vector<int64_t>& bytes, int64_t max_bytes);

/// The tensors of `parameters` in `weights`, in that order; they borrow from it.
/// A tied one is there under the name that owns it alone, whatever name it has in
/// `weights`. Throws DataError where weights have a tied one under two names with
/// different values, or where one is missing.
std::vector<safetensors::TensorBytes> owned_tensors(
    const WeightsSource& weights,
    const std::vector<ParameterInfo>& parameters);

/// Writes them into `folder`, which exists: as model.safetensors, or, where that
/// would be larger than `max_shard_bytes`, as shards with
/// model.safetensors.index.json. Nothing is converted. Throws CheckpointError when
/// the disk does not take it. Returns the names of the files.
std::vector<std::string> write_weights(
    const std::vector<safetensors::TensorBytes>& tensors,
    const std::string& folder,
    int64_t max_shard_bytes);

}  // namespace echelon::hugging_face
