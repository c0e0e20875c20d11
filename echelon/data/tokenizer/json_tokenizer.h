// The tokenizer of a Hugging Face tokenizer.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "echelon/data/tokenizer/tokenizer.h"

namespace echelon {

/// Byte-pair encoding as the files of GPT-2, Llama-2, Llama-3 and their kin
/// describe it. What is known stands in normalizer.h, pre_tokenizer.h,
/// decoder.h and bpe.h under tokenizer/; post-processors: TemplateProcessing,
/// RobertaProcessing, BertProcessing, ByteLevel, Sequence; added tokens with
/// all their flags. "truncation" and "padding" are not applied.
///
/// Throws DataError that names `path` and the place in it: no JSON, a component
/// that is not known, or one that contradicts itself. The library is
/// deterministic: the ids are those of Python's `tokenizers`.
std::unique_ptr<Tokenizer> load_json_tokenizer(const std::string& path);

/// The same, of the file's content.
std::unique_ptr<Tokenizer>
parse_json_tokenizer(std::string_view content, const std::string& path);

}  // namespace echelon
