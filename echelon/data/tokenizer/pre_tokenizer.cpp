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

Behavior behavior_of(Fields& fields, const std::string& otherwise) {
  const std::string name = fields.text("behavior", otherwise);
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

/// Replaces each piece by its spans.
template <typename SplitOne>
void split_pieces(Pieces& pieces, Behavior behavior, SplitOne&& split_one) {
  std::vector<Pieces::Piece> list;
  std::vector<Span> spans;
  for (const auto& piece : pieces.list) {
    spans.clear();
    split_one(piece.text, spans);
    join_spans(spans, behavior);
    for (const auto& span : spans) {
      list.push_back(
          {piece.text.substr(span.begin, span.end - span.begin),
           piece.first && span.begin == 0});
    }
  }
  pieces.list = std::move(list);
}

/// Spans of single characters for which `is` holds, and of the runs between
/// them.
template <typename Is>
void split_by_character(
    std::string_view text, std::vector<Span>& spans, Is&& is) {
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const bool match = is(next_character(text, at));
    if (!match && !spans.empty() && !spans.back().match) {
      spans.back().end = at;
    } else {
      spans.push_back({begin, at, match});
    }
  }
}

class PreTokenizerChain : public PreTokenizer {
 public:
  explicit PreTokenizerChain(std::vector<std::unique_ptr<PreTokenizer>> parts)
      : parts_(std::move(parts)) {}
  void apply(Pieces& pieces) const override {
    for (const auto& part : parts_) part->apply(pieces);
  }
  bool in_bytes() const override {
    return !parts_.empty() && parts_.back()->in_bytes();
  }

 private:
  std::vector<std::unique_ptr<PreTokenizer>> parts_;
};

class Split : public PreTokenizer {
 public:
  Split(Pattern pattern, Behavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}
  void apply(Pieces& pieces) const override {
    split_pieces(pieces, behavior_, [&](std::string_view text, auto& spans) {
      pattern_.split(text, spans);
      if (!invert_) return;
      for (auto& span : spans) span.match = !span.match;
    });
  }

 private:
  Pattern pattern_;
  Behavior behavior_;
  bool invert_;
};

class ByteLevelSplit : public PreTokenizer {
 public:
  ByteLevelSplit(bool prefix, bool use_regex, const std::string& place)
      : prefix_(prefix) {
    if (use_regex) regex_.emplace(kGpt2Pattern, place);
  }
  void apply(Pieces& pieces) const override {
    for (auto& piece : pieces.list) {
      if (!prefix_ || piece.text.starts_with(' ')) continue;
      piece.text = pieces.strings.emplace_back(" " + std::string(piece.text));
    }
    if (!regex_) return;
    split_pieces(
        pieces, Behavior::isolated, [&](std::string_view text, auto& spans) {
          regex_->split(text, spans);
        });
  }
  bool in_bytes() const override { return true; }

 private:
  bool prefix_;
  std::optional<Regex> regex_;
};

class MetaspaceSplit : public PreTokenizer {
 public:
  enum class Scheme { always, first, never };

  MetaspaceSplit(std::string replacement, Scheme scheme, bool split)
      : replacement_(std::move(replacement)), scheme_(scheme), split_(split) {}
  void apply(Pieces& pieces) const override {
    for (auto& piece : pieces.list) {
      std::string text;
      for (const char c : piece.text) {
        if (c == ' ') {
          text += replacement_;
        } else {
          text += c;
        }
      }
      const bool prepend = scheme_ == Scheme::always ||
                           (scheme_ == Scheme::first && piece.first);
      if (prepend && !text.starts_with(replacement_)) {
        text.insert(0, replacement_);
      }
      piece.text = pieces.strings.emplace_back(std::move(text));
    }
    if (!split_) return;
    split_pieces(
        pieces, Behavior::merged_with_next,
        [&](std::string_view text, auto& spans) {
          size_t at = 0;
          while (at < text.size()) {
            const size_t found =
                std::min(text.size(), text.find(replacement_, at));
            if (found > at) spans.push_back({at, found, false});
            if (found == text.size()) break;
            at = found + replacement_.size();
            spans.push_back({found, at, true});
          }
        });
  }

 private:
  std::string replacement_;
  Scheme scheme_;
  bool split_;
};

/// Splits at the characters for which `is` holds.
class ByCharacter : public PreTokenizer {
 public:
  ByCharacter(std::function<bool(char32_t)> is, Behavior behavior)
      : is_(std::move(is)), behavior_(behavior) {}
  void apply(Pieces& pieces) const override {
    split_pieces(pieces, behavior_, [&](std::string_view text, auto& spans) {
      split_by_character(text, spans, is_);
    });
  }

 private:
  std::function<bool(char32_t)> is_;
  Behavior behavior_;
};

/// Runs of word characters, and runs of other characters except white space.
class Whitespace : public PreTokenizer {
 public:
  void apply(Pieces& pieces) const override {
    split_pieces(
        pieces, Behavior::isolated, [](std::string_view text, auto& spans) {
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
        });
  }
};

std::unique_ptr<PreTokenizer> make_sequence(Fields& fields) {
  auto parts = fields.components("pretokenizers", make_pre_tokenizer);
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    if (parts[i]->in_bytes()) {
      fields.fail("ByteLevel must be the last of a sequence");
    }
  }
  return std::make_unique<PreTokenizerChain>(std::move(parts));
}

std::unique_ptr<PreTokenizer> make_metaspace_split(Fields& fields) {
  const std::string replacement = fields.text("replacement");
  // Older files have this flag instead of prepend_scheme.
  const bool prefix = fields.flag("add_prefix_space", true);
  fields.find("str_rep");
  const std::string scheme =
      fields.text("prepend_scheme", prefix ? "always" : "never");
  const bool split = fields.flag("split", true);
  auto value = MetaspaceSplit::Scheme::always;
  if (scheme == "first") {
    value = MetaspaceSplit::Scheme::first;
  } else if (scheme == "never") {
    value = MetaspaceSplit::Scheme::never;
  } else if (scheme != "always") {
    fields.fail("prepend_scheme " + scheme + " is not known");
  }
  if (replacement.empty()) fields.fail("\"replacement\" must not be empty");
  return std::make_unique<MetaspaceSplit>(replacement, value, split);
}

}  // namespace

std::unique_ptr<PreTokenizer> make_pre_tokenizer(
    const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  const std::string type = fields.text("type");
  std::unique_ptr<PreTokenizer> made;
  if (type == "Sequence") {
    made = make_sequence(fields);
  } else if (type == "Split") {
    Pattern pattern(fields.at("pattern"), fields.place("pattern"));
    const Behavior behavior = behavior_of(fields, "Isolated");
    made = std::make_unique<Split>(
        std::move(pattern), behavior, fields.flag("invert", false));
  } else if (type == "ByteLevel") {
    const bool prefix = fields.flag("add_prefix_space", true);
    fields.flag("trim_offsets", true);
    made = std::make_unique<ByteLevelSplit>(
        prefix, fields.flag("use_regex", true), place);
  } else if (type == "Metaspace") {
    made = make_metaspace_split(fields);
  } else if (type == "Whitespace") {
    made = std::make_unique<Whitespace>();
  } else if (type == "WhitespaceSplit") {
    made = std::make_unique<ByCharacter>(is_space, Behavior::removed);
  } else if (type == "Digits") {
    const bool single = fields.flag("individual_digits", false);
    made = std::make_unique<ByCharacter>(
        is_number, single ? Behavior::isolated : Behavior::contiguous);
  } else if (type == "Punctuation") {
    made = std::make_unique<ByCharacter>(
        is_punctuation, behavior_of(fields, "Isolated"));
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
