// Language models as Hugging Face's transformers keep them: a folder with
// config.json and weights in safetensors files. Free of LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/checkpoint/format/tensor_stream.h"
#include "echelon/options/model.h"

namespace echelon::hugging_face {

/// The model of a config.json, every number set: name "gpt" for
/// GPT2LMHeadModel, "llama" for LlamaForCausalLM; where no architecture is
/// named, by model_type, "gpt2" or "llama". Missing fields have transformers'
/// defaults.
///
///   path  of the config.json
///
/// Throws DataError, with the field, its value and what is known, when the file
/// is missing or malformed, for another architecture, and for whatever these
/// models here do not compute: other activations, biases or scalings of llama,
/// a quantised model, dropouts that differ …
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

/// The tensors of `parameters` in `source`, in that order, under the names that
/// own tied ones, whatever names they have in `source`. Throws DataError where
/// it has a tied one under two names with different values, or where one is
/// missing.
///
///   dtype  to write floating-point ones in, as safetensors names it; empty: as
///          they are
std::vector<TensorToWrite> owned_tensors(
    TensorSource& source, const std::vector<ParameterInfo>& parameters,
    const std::string& dtype = "");

/// Writes them into `folder`, which exists: as model.safetensors, or, where
/// that would be larger than `max_shard_bytes`, as shards with
/// model.safetensors.index.json. Throws as write_tensors, and CheckpointError
/// when the disk has not so much left. Returns the names of the files.
std::vector<std::string> write_weights(
    TensorSource& source, const std::vector<TensorToWrite>& tensors,
    const std::string& folder, int64_t max_shard_bytes);

}  // namespace echelon::hugging_face
