// Language models in the format of Hugging Face's transformers: a folder with
// config.json and weights in safetensors files. Free of LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon::hugging_face {

struct ConfigText {
  std::string dtype = "float32";
  std::optional<int64_t> end_of_text;  // a token's id
};

/// A config.json that transformers reads as the same model.
std::string
write_config(const LanguageModelShape& shape, const ConfigText& text = {});

/// A generation_config.json for it.
std::string generation_config(const ConfigText& text = {});

/// Assigns tensors to files in their order, each file at most `max_bytes`
/// except where a single tensor is larger.
///
///   bytes    the size of each tensor
///   returns  for each file its tensors [begin, end)
std::vector<std::pair<size_t, size_t>>
pack_shards(const std::vector<int64_t>& bytes, int64_t max_bytes);

/// The tensors of `parameters` in `source`, in that order. A tied parameter
/// comes once, under the name that owns it, whichever of its names it has in
/// `source`. Throws DataError where `source` has it under two names with
/// different values, or where a tensor is missing.
///
///   dtype  for floating-point tensors, as safetensors names it; empty: keep
///          that of the source
std::vector<TensorToWrite> owned_tensors(
    TensorSource& source, const std::vector<ParameterInfo>& parameters,
    const std::string& dtype = "");

/// Writes the tensors into `folder`, which exists: as model.safetensors, or, if
/// that would be larger than `max_shard_bytes`, as shards with
/// model.safetensors.index.json. Throws as write_tensors does, and
/// CheckpointError when the disk has not enough space. Returns the names of the
/// files.
std::vector<std::string> write_weights(
    TensorSource& source, const std::vector<TensorToWrite>& tensors,
    const std::string& folder, int64_t max_shard_bytes);

}  // namespace echelon::hugging_face
