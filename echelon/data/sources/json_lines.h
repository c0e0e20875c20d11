// .jsonl files: a document on each line, as a JSON object.
//
//   {"text": "…"}                                    a text
//   {"messages": [{"role": "user", "content": "…"}, …]}   a conversation
//   {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}    tokens, as they are
//
// In a conversation the loss is on the assistant's tokens alone: on what it
// says, and on the token that ends its turn. loss_mask says it of tokens; it
// may be absent.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/options/data.h"

namespace echelon {

/// How lines become tokens.
struct LineRecipe {
  std::string text_field = "text";
  ChatTemplate chat_template = ChatTemplate::chatml;
  int64_t end_of_text = -1;  // a token added after each text; -1: none
};

/// A document, and which of its tokens count in the loss.
struct LineTokens {
  std::vector<TokenId> ids;
  std::vector<uint8_t> counts;  // 0 or 1, one for each id
};

/// The tokens of a line that is not empty.
///
/// A conversation becomes a text as the template says; each part that someone
/// wrote is encoded on its own, so that a turn's tokens are those that a model
/// generates behind its header:
///
///   chatml  <|im_start|>ROLE\nCONTENT<|im_end|>\n             for each message
///   llama3  <|begin_of_text|>, then for each message
///           <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>,
///           with CONTENT without white space at its ends
///
/// Roles are system, user, assistant and tool. Sources: the templates of
/// OpenAI's ChatML and of Meta's Llama 3.
///
/// Throws DataError, which says what is expected, for a line that is not such
/// an object, a conversation without a message of the assistant, ids that the
/// tokenizer does not have, and a mask of another length; as
/// Tokenizer::encode() too. Throws ConfigError for a conversation where the
/// tokenizer lacks the template's tokens; that of bytes spells them.
LineTokens tokens_of_line(
    std::string_view line, const LineRecipe& recipe,
    const Tokenizer& tokenizer);

}  // namespace echelon
