// The tokenizer of a SentencePiece model.
#pragma once

#include <memory>
#include <string>

#include "echelon/data/tokenizer/tokenizer.h"

namespace echelon {

/// Any model that the SentencePiece library reads: BPE, unigram, and others.
/// Throws DataError for a file that is none.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);

}  // namespace echelon
