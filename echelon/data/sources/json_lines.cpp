#include "echelon/data/sources/json_lines.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "echelon/data/tokenizer/unicode.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

using nlohmann::json;

constexpr const char* kAssistant = "assistant";

const std::vector<std::string>& roles() {
  static const std::vector<std::string> all = {
      "system", "user", kAssistant, "tool"};
  return all;
}

[[noreturn]] void fail(const std::string& what) {
  throw DataError(what);
}

// The special tokens of a template, in the order of the header's comment.
std::vector<std::string> special_tokens(ChatTemplate chat) {
  if (chat == ChatTemplate::chatml) return {"<|im_start|>", "<|im_end|>"};
  return {
      "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
      "<|eot_id|>"};
}

struct Message {
  std::string role;
  std::string content;
};

std::string
text_at(const json& object, const char* key, const std::string& place) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    fail(format(
        "{} has no \"{}\" that is a text; expected {{\"role\": \"user\", "
        "\"content\": \"…\"}}",
        place, key));
  }
  return found->get<std::string>();
}

std::vector<Message> messages_of(const json& list) {
  if (!list.is_array() || list.empty()) {
    fail(
        "\"messages\" is no list of messages; expected [{\"role\": \"user\", "
        "\"content\": \"…\"}, …]");
  }
  std::vector<Message> messages;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string place = format("message {}", i + 1);
    if (!list[i].is_object()) {
      fail(format(
          "{} is no object; expected {{\"role\": \"user\", \"content\": "
          "\"…\"}}",
          place));
    }
    Message one{
        text_at(list[i], "role", place), text_at(list[i], "content", place)};
    if (std::ranges::count(roles(), one.role) == 0) {
      fail(format(
          "{} has the role \"{}\"; expected {}{}", place, one.role,
          join(roles(), ", "), config::did_you_mean(one.role, roles())));
    }
    messages.push_back(std::move(one));
  }
  if (std::ranges::count(messages, kAssistant, &Message::role) == 0) {
    fail(
        "no message has the role \"assistant\", so no token counts in the "
        "loss; leave the line out");
  }
  return messages;
}

void append(
    LineTokens& all, const Tokenizer& tokenizer, const std::string& text,
    bool counts) {
  const auto ids = tokenizer.encode(text);
  all.ids.insert(all.ids.end(), ids.begin(), ids.end());
  all.counts.resize(all.ids.size(), counts ? 1 : 0);
}

// Throws ConfigError for a tokenizer without the template's tokens; the one of
// bytes spells them.
void check_chat_template(ChatTemplate chat, const Tokenizer& tokenizer) {
  if (dynamic_cast<const ByteTokenizer*>(&tokenizer) != nullptr) return;
  for (const auto& token : special_tokens(chat)) {
    if (tokenizer.find(token)) continue;
    throw ConfigError(format(
        "[data] chat_template=\"{}\": the tokenizer has no token \"{}\"; name "
        "the model's own tokenizer, or set chat_template=\"{}\"",
        to_string(chat), token,
        to_string(
            chat == ChatTemplate::chatml ? ChatTemplate::llama3
                                         : ChatTemplate::chatml)));
  }
}

LineTokens conversation(
    const std::vector<Message>& messages, ChatTemplate chat,
    const Tokenizer& tokenizer) {
  check_chat_template(chat, tokenizer);
  LineTokens all;
  const auto add = [&](const std::string& text, bool counts) {
    append(all, tokenizer, text, counts);
  };
  if (chat == ChatTemplate::llama3) add("<|begin_of_text|>", false);
  for (const auto& [role, content] : messages) {
    const bool counts = role == kAssistant;
    if (chat == ChatTemplate::chatml) {
      add("<|im_start|>" + role + "\n", false);
      add(content + "<|im_end|>", counts);
      add("\n", false);
    } else {
      add("<|start_header_id|>" + role + "<|end_header_id|>\n\n", false);
      add(std::string(detail::stripped(content)) + "<|eot_id|>", counts);
    }
  }
  return all;
}

// Whole numbers in [0, end).
std::vector<int64_t>
numbers_of(const json& list, const char* key, int64_t end) {
  if (!list.is_array()) {
    fail(format("\"{}\" is no list; expected whole numbers", key));
  }
  std::vector<int64_t> numbers;
  for (const auto& one : list) {
    const bool fits = one.is_number_integer() && one.get<int64_t>() >= 0 &&
                      one.get<int64_t>() < end;
    if (!fits) {
      fail(format(
          "\"{}\" has {}; expected whole numbers from 0 to {}", key, one.dump(),
          end - 1));
    }
    numbers.push_back(one.get<int64_t>());
  }
  return numbers;
}

LineTokens given_tokens(const json& object, int64_t vocabulary) {
  LineTokens all;
  for (const int64_t id : numbers_of(object["tokens"], "tokens", vocabulary)) {
    all.ids.push_back(static_cast<TokenId>(id));
  }
  all.counts.assign(all.ids.size(), 1);
  const auto mask = object.find("loss_mask");
  if (mask == object.end()) return all;
  const auto counts = numbers_of(*mask, "loss_mask", 2);
  if (counts.size() != all.ids.size()) {
    fail(format(
        "\"loss_mask\" has {} numbers for {} tokens; expected one for each",
        counts.size(), all.ids.size()));
  }
  std::ranges::copy(counts, all.counts.begin());
  return all;
}

json parsed(std::string_view line) {
  try {
    return json::parse(line);
  } catch (const json::exception& error) {
    std::string why = error.what();
    const size_t colon = why.find("syntax error");
    if (colon != std::string::npos) why.erase(0, colon);
    fail(format("is no JSON: {}; expected an object on each line", why));
  }
}

}  // namespace

LineTokens tokens_of_line(
    std::string_view line, const LineRecipe& recipe,
    const Tokenizer& tokenizer) {
  const json object = parsed(line);
  if (object.is_object() && object.contains("messages")) {
    return conversation(
        messages_of(object["messages"]), recipe.chat_template, tokenizer);
  }
  if (object.is_object() && object.contains("tokens")) {
    return given_tokens(object, tokenizer.vocab_size());
  }
  const auto found =
      object.is_object() ? object.find(recipe.text_field) : object.end();
  if (!object.is_object() || found == object.end() || !found->is_string()) {
    fail(format(
        "is no object with \"messages\", \"tokens\" or a text \"{}\" ([data] "
        "text_field)",
        recipe.text_field));
  }
  LineTokens all;
  append(all, tokenizer, found->get<std::string>(), true);
  if (recipe.end_of_text >= 0 && !all.ids.empty()) {
    all.ids.push_back(static_cast<TokenId>(recipe.end_of_text));
    all.counts.push_back(1);
  }
  return all;
}

}  // namespace echelon
