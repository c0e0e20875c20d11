// The tokenizer of a Hugging Face tokenizer.json.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "echelon/data/tokenizer/tokenizer.h"

namespace echelon {

/// Byte-pair encoding as the files of GPT-2, Llama-2, Llama-3 and similar
/// models describe it, with the components of components.h; the post-processors
/// TemplateProcessing, RobertaProcessing, BertProcessing, ByteLevel, Sequence;
/// and added tokens with all their flags. "truncation" and "padding" are not
/// applied. The ids are those of Python's `tokenizers`.
///
/// Throws DataError with `path` and the place in it when the file is not JSON,
/// or when a component is unknown or inconsistent.
std::unique_ptr<Tokenizer> load_json_tokenizer(const std::string& path);

/// The same from the content of the file.
std::unique_ptr<Tokenizer>
parse_json_tokenizer(std::string_view content, const std::string& path);

}  // namespace echelon
