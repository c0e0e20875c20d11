// Each component of the file becomes one function; a Sequence becomes a
// function that calls the others in order. Pre-tokenizers work on pieces: each
// splits every piece into spans, some of which match, and a behavior says
// whether matches are removed, kept apart, or joined with a neighbour.
#include "echelon/data/tokenizer/components.h"

#include <algorithm>
#include <charconv>

#include "echelon/data/tokenizer/bpe.h"
#include "echelon/data/tokenizer/json_fields.h"

namespace echelon::detail {

Pattern::Pattern(const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  if (fields.find("String") != nullptr) {
    literal_ = fields.text("String");
  } else {
    regex_.emplace(fields.text("Regex"), place);
  }
  fields.end();
}

void Pattern::split(std::string_view text, std::vector<Span>& spans) const {
  if (regex_) {
    regex_->split(text, spans);
    return;
  }
  size_t at = 0;
  while (!literal_.empty()) {
    const size_t found = text.find(literal_, at);
    if (found == std::string_view::npos) break;
    if (found > at) spans.push_back({at, found, false});
    at = found + literal_.size();
    spans.push_back({found, at, true});
  }
  if (at < text.size()) spans.push_back({at, text.size(), false});
}

std::string
Pattern::replaced(std::string_view text, std::string_view content) const {
  std::vector<Span> spans;
  split(text, spans);
  std::string out;
  out.reserve(text.size());
  for (const auto& [begin, end, match] : spans) {
    out += match ? content : text.substr(begin, end - begin);
  }
  return out;
}

// --- Normalizers -----------------------------------------------------------

namespace {

Normalizer in_form(NormalForm form) {
  return [form](std::string& text) { text = normal_form(text, form); };
}

}  // namespace

Normalizer
make_normalizer(const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  const std::string type = fields.text("type");
  Normalizer made;
  if (type == "Sequence") {
    made = [parts = fields.components("normalizers", make_normalizer)](
               std::string& text) {
      for (const auto& part : parts) part(text);
    };
  } else if (type == "Prepend") {
    made = [front = fields.text("prepend")](std::string& text) {
      if (!text.empty()) text.insert(0, front);
    };
  } else if (type == "Replace") {
    const Pattern pattern(fields.at("pattern"), fields.place("pattern"));
    made = [pattern, content = fields.text("content")](std::string& text) {
      text = pattern.replaced(text, content);
    };
  } else if (type == "NFC") {
    made = in_form(NormalForm::nfc);
  } else if (type == "NFD") {
    made = in_form(NormalForm::nfd);
  } else if (type == "NFKC") {
    made = in_form(NormalForm::nfkc);
  } else if (type == "NFKD") {
    made = in_form(NormalForm::nfkd);
  } else if (type == "Lowercase") {
    made = [](std::string& text) { text = lower_case(text); };
  } else if (type == "Strip") {
    const bool left = fields.flag("strip_left", true);
    made = [left, right = fields.flag("strip_right", true)](std::string& text) {
      text = std::string(stripped(text, left, right));
    };
  } else {
    fields.fail(
        "a normalizer of type " + type +
        " is not known; there are Sequence, Prepend, Replace, NFC, NFD, NFKC, "
        "NFKD, Lowercase and Strip");
  }
  fields.end();
  return made;
}

// --- Pre-tokenizers --------------------------------------------------------

namespace {

/// What happens to the parts of a text that a pattern matches.
enum class Behavior {
  removed,
  isolated,
  merged_with_previous,
  merged_with_next,
  contiguous,
};

Behavior behavior_of(Fields& fields) {
  const std::string name = fields.text("behavior", "Isolated");
  if (name == "Removed") return Behavior::removed;
  if (name == "Isolated") return Behavior::isolated;
  if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
  if (name == "MergedWithNext") return Behavior::merged_with_next;
  if (name == "Contiguous") return Behavior::contiguous;
  fields.fail("behavior " + name + " is not known");
}

/// Removes or joins spans by `behavior`, so that each is a word.
void join_spans(std::vector<Span>& spans, Behavior behavior) {
  if (behavior == Behavior::isolated) return;
  if (behavior == Behavior::removed) {
    std::erase_if(spans, [](const auto& span) { return span.match; });
    return;
  }
  const bool backwards = behavior == Behavior::merged_with_next;
  if (backwards) std::reverse(spans.begin(), spans.end());
  std::vector<Span> joined;
  bool before = false;  // whether the span before was a match
  for (const auto& span : spans) {
    const bool join = behavior == Behavior::contiguous ? span.match == before
                                                       : span.match && !before;
    before = span.match;
    if (!join || joined.empty()) {
      joined.push_back(span);
    } else if (backwards) {
      joined.back().begin = span.begin;
    } else {
      joined.back().end = span.end;
    }
  }
  if (backwards) std::reverse(joined.begin(), joined.end());
  spans = std::move(joined);
}

/// Appends the spans of a text.
using SplitText = std::function<void(std::string_view, std::vector<Span>&)>;

/// Replaces each piece by its spans.
void split_pieces(Pieces& pieces, const SplitText& split, Behavior behavior) {
  std::vector<Pieces::Piece> list;
  std::vector<Span> spans;
  for (const auto& piece : pieces.list) {
    spans.clear();
    split(piece.text, spans);
    join_spans(spans, behavior);
    for (const auto& span : spans) {
      list.push_back(
          {piece.text.substr(span.begin, span.end - span.begin),
           piece.first && span.begin == 0});
    }
  }
  pieces.list = std::move(list);
}

PreTokenizer splitter(SplitText split, Behavior behavior) {
  return {[split = std::move(split), behavior](Pieces& pieces) {
    split_pieces(pieces, split, behavior);
  }};
}

/// Spans of single characters for which `is` holds, and of the runs between
/// them.
SplitText by_character(bool (*is)(char32_t)) {
  return [is](std::string_view text, std::vector<Span>& spans) {
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      const bool match = is(next_character(text, at));
      if (!match && !spans.empty() && !spans.back().match) {
        spans.back().end = at;
      } else {
        spans.push_back({begin, at, match});
      }
    }
  };
}

/// Runs of word characters, and runs of other characters except white space.
void split_at_white_space(std::string_view text, std::vector<Span>& spans) {
  enum { space, word, other } before = space;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_character(text, at);
    const auto kind = is_word(c) ? word : is_space(c) ? space : other;
    if (kind != space && kind == before) {
      spans.back().end = at;
    } else if (kind != space) {
      spans.push_back({begin, at, true});
    }
    before = kind;
  }
}

PreTokenizer make_sequence(Fields& fields) {
  auto parts = fields.components("pretokenizers", make_pre_tokenizer);
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    if (parts[i].in_bytes) {
      fields.fail("ByteLevel must be the last of a sequence");
    }
  }
  const bool in_bytes = !parts.empty() && parts.back().in_bytes;
  return {
      [parts = std::move(parts)](Pieces& pieces) {
        for (const auto& part : parts) part.apply(pieces);
      },
      in_bytes};
}

PreTokenizer make_split(Fields& fields) {
  const Pattern pattern(fields.at("pattern"), fields.place("pattern"));
  const Behavior behavior = behavior_of(fields);
  const bool invert = fields.flag("invert", false);
  return splitter(
      [pattern, invert](std::string_view text, std::vector<Span>& spans) {
        pattern.split(text, spans);
        if (!invert) return;
        for (auto& span : spans) span.match = !span.match;
      },
      behavior);
}

PreTokenizer make_byte_level(Fields& fields) {
  const bool prefix = fields.flag("add_prefix_space", true);
  fields.flag("trim_offsets", true);
  SplitText split;
  if (fields.flag("use_regex", true)) {
    split = [regex = Regex(kGpt2Pattern, fields.place())](
                std::string_view text, std::vector<Span>& spans) {
      regex.split(text, spans);
    };
  }
  return {
      [prefix, split = std::move(split)](Pieces& pieces) {
        for (auto& piece : pieces.list) {
          if (!prefix || piece.text.starts_with(' ')) continue;
          piece.text =
              pieces.strings.emplace_back(" " + std::string(piece.text));
        }
        if (split) split_pieces(pieces, split, Behavior::isolated);
      },
      true};
}

PreTokenizer make_metaspace_split(Fields& fields) {
  enum class Scheme { always, first, never };
  const std::string replacement = fields.text("replacement");
  // Older files have this flag instead of prepend_scheme.
  const bool prefix = fields.flag("add_prefix_space", true);
  fields.find("str_rep");
  const std::string name =
      fields.text("prepend_scheme", prefix ? "always" : "never");
  const bool split = fields.flag("split", true);
  auto scheme = Scheme::always;
  if (name == "first") {
    scheme = Scheme::first;
  } else if (name == "never") {
    scheme = Scheme::never;
  } else if (name != "always") {
    fields.fail("prepend_scheme " + name + " is not known");
  }
  if (replacement.empty()) fields.fail("\"replacement\" must not be empty");
  const SplitText split_at_replacement = [pattern = Pattern(replacement)](
                                             std::string_view text,
                                             std::vector<Span>& spans) {
    pattern.split(text, spans);
  };
  return {[=](Pieces& pieces) {
    for (auto& piece : pieces.list) {
      std::string text = Pattern(" ").replaced(piece.text, replacement);
      const bool prepend =
          scheme == Scheme::always || (scheme == Scheme::first && piece.first);
      if (prepend && !text.starts_with(replacement)) {
        text.insert(0, replacement);
      }
      piece.text = pieces.strings.emplace_back(std::move(text));
    }
    if (!split) return;
    split_pieces(pieces, split_at_replacement, Behavior::merged_with_next);
  }};
}

}  // namespace

PreTokenizer make_pre_tokenizer(
    const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  const std::string type = fields.text("type");
  PreTokenizer made;
  if (type == "Sequence") {
    made = make_sequence(fields);
  } else if (type == "Split") {
    made = make_split(fields);
  } else if (type == "ByteLevel") {
    made = make_byte_level(fields);
  } else if (type == "Metaspace") {
    made = make_metaspace_split(fields);
  } else if (type == "Whitespace") {
    made = splitter(split_at_white_space, Behavior::isolated);
  } else if (type == "WhitespaceSplit") {
    made = splitter(by_character(is_space), Behavior::removed);
  } else if (type == "Digits") {
    const bool single = fields.flag("individual_digits", false);
    made = splitter(
        by_character(is_number),
        single ? Behavior::isolated : Behavior::contiguous);
  } else if (type == "Punctuation") {
    made = splitter(by_character(is_punctuation), behavior_of(fields));
  } else {
    fields.fail(
        "a pre-tokenizer of type " + type +
        " is not known; there are Sequence, Split, ByteLevel, Metaspace, "
        "Whitespace, WhitespaceSplit, Digits and Punctuation");
  }
  fields.end();
  return made;
}

// --- Decoders --------------------------------------------------------------

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
