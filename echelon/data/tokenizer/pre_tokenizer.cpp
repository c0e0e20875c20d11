#include "echelon/data/tokenizer/components.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "echelon/data/tokenizer/json_fields.h"

namespace echelon::detail {
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

}  // namespace echelon::detail
