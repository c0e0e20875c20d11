#include "echelon/data/tokenizer/components.h"

#include <charconv>
#include <utility>

#include "echelon/data/tokenizer/bpe.h"
#include "echelon/data/tokenizer/json_fields.h"

namespace echelon::detail {
namespace {

using Tokens = std::vector<std::string>;

/// Leaves tokens with characters that do not stand for bytes as they are.
void decode_bytes(Tokens& tokens) {
  std::string bytes;
  for (auto& token : tokens) {
    if (bytes_of_token(token, bytes)) token = bytes;
  }
}

/// "<0x41>" -> "A"
void decode_fallback(Tokens& tokens) {
  for (auto& token : tokens) {
    if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') {
      continue;
    }
    uint8_t byte = 0;
    const char* end = token.data() + 5;
    const auto [stop, error] = std::from_chars(token.data() + 3, end, byte, 16);
    if (error == std::errc() && stop == end) {
      token = std::string(1, static_cast<char>(byte));
    }
  }
}

/// Removes up to `start` and `stop` copies of `content` from the ends.
void strip_tokens(
    Tokens& tokens, const std::string& content, int32_t start, int32_t stop) {
  for (auto& token : tokens) {
    for (int32_t i = 0; i < start && token.starts_with(content); ++i) {
      token.erase(0, content.size());
    }
    for (int32_t i = 0; i < stop && token.ends_with(content); ++i) {
      token.erase(token.size() - content.size());
    }
  }
}

Decoder make_metaspace(Fields& fields) {
  const std::string replacement = fields.text("replacement");
  const bool prefix = fields.flag("add_prefix_space", true);
  fields.find("str_rep");
  fields.find("split");
  const bool prepended =
      fields.text("prepend_scheme", prefix ? "always" : "never") != "never";
  if (replacement.empty()) fields.fail("\"replacement\" must not be empty");
  return [space = Pattern(replacement), prepended](Tokens& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = space.replaced(tokens[i], i == 0 && prepended ? "" : " ");
    }
  };
}

}  // namespace

Decoder
make_decoder(const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  const std::string type = fields.text("type");
  Decoder made;
  if (type == "Sequence") {
    made = [parts =
                fields.components("decoders", make_decoder)](Tokens& tokens) {
      for (const auto& part : parts) part(tokens);
    };
  } else if (type == "ByteLevel") {
    for (const char* key : {"add_prefix_space", "trim_offsets", "use_regex"}) {
      fields.flag(key, true);
    }
    made = decode_bytes;
  } else if (type == "ByteFallback") {
    made = decode_fallback;
  } else if (type == "Fuse") {
    made = [](Tokens& tokens) { tokens = {join(tokens, "")}; };
  } else if (type == "Replace") {
    const Pattern pattern(fields.at("pattern"), fields.place("pattern"));
    made = [pattern, content = fields.text("content")](Tokens& tokens) {
      for (auto& token : tokens) {
        // Patterns are for text: bytes of incomplete characters are skipped.
        if (valid_utf8(token) != token) continue;
        token = pattern.replaced(token, content);
      }
    };
  } else if (type == "Strip") {
    const std::string content = fields.text("content");
    if (content.empty()) fields.fail("\"content\" must not be empty");
    const int32_t start = fields.number("start");
    const int32_t stop = fields.number("stop");
    made = [content, start, stop](Tokens& tokens) {
      strip_tokens(tokens, content, start, stop);
    };
  } else if (type == "Metaspace") {
    made = make_metaspace(fields);
  } else {
    fields.fail(
        "a decoder of type " + type +
        " is not known; there are Sequence, ByteLevel, ByteFallback, Fuse, "
        "Replace, Strip and Metaspace");
  }
  fields.end();
  return made;
}

}  // namespace echelon::detail
