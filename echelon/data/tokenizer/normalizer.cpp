#include "echelon/data/tokenizer/components.h"

#include <utility>
#include <vector>

#include "echelon/data/tokenizer/json_fields.h"

namespace echelon::detail {
namespace {

class NormalizerChain : public Normalizer {
 public:
  explicit NormalizerChain(std::vector<std::unique_ptr<Normalizer>> parts)
      : parts_(std::move(parts)) {}
  void apply(std::string& text) const override {
    for (const auto& part : parts_) part->apply(text);
  }

 private:
  std::vector<std::unique_ptr<Normalizer>> parts_;
};

class Prepend : public Normalizer {
 public:
  explicit Prepend(std::string front) : front_(std::move(front)) {}
  void apply(std::string& text) const override {
    if (!text.empty()) text.insert(0, front_);
  }

 private:
  std::string front_;
};

class NormalizerReplace : public Normalizer {
 public:
  NormalizerReplace(Pattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply(std::string& text) const override {
    std::vector<Span> spans;
    pattern_.split(text, spans);
    std::string out;
    out.reserve(text.size());
    for (const auto& span : spans) {
      if (span.match) {
        out += content_;
      } else {
        out.append(text, span.begin, span.end - span.begin);
      }
    }
    text = std::move(out);
  }

 private:
  Pattern pattern_;
  std::string content_;
};

class Form : public Normalizer {
 public:
  explicit Form(NormalForm form) : form_(form) {}
  void apply(std::string& text) const override {
    text = normal_form(text, form_);
  }

 private:
  NormalForm form_;
};

class Lowercase : public Normalizer {
 public:
  void apply(std::string& text) const override { text = lower_case(text); }
};

class NormalizerStrip : public Normalizer {
 public:
  NormalizerStrip(bool left, bool right) : left_(left), right_(right) {}
  void apply(std::string& text) const override {
    size_t begin = 0, end = 0, at = 0;
    bool leading = true;
    while (at < text.size()) {
      const bool space = is_space(next_character(text, at));
      if (space && leading) begin = at;
      if (!space) end = at;
      leading = leading && space;
    }
    if (!left_) begin = 0;
    if (!right_) end = text.size();
    text = begin < end ? text.substr(begin, end - begin) : "";
  }

 private:
  bool left_;
  bool right_;
};

}  // namespace

std::unique_ptr<Normalizer>
make_normalizer(const nlohmann::json& description, const std::string& place) {
  Fields fields(description, place);
  const std::string type = fields.text("type");
  std::unique_ptr<Normalizer> made;
  if (type == "Sequence") {
    made = std::make_unique<NormalizerChain>(
        fields.components("normalizers", make_normalizer));
  } else if (type == "Prepend") {
    made = std::make_unique<Prepend>(fields.text("prepend"));
  } else if (type == "Replace") {
    Pattern pattern(fields.at("pattern"), fields.place("pattern"));
    made = std::make_unique<NormalizerReplace>(
        std::move(pattern), fields.text("content"));
  } else if (type == "NFC") {
    made = std::make_unique<Form>(NormalForm::nfc);
  } else if (type == "NFD") {
    made = std::make_unique<Form>(NormalForm::nfd);
  } else if (type == "NFKC") {
    made = std::make_unique<Form>(NormalForm::nfkc);
  } else if (type == "NFKD") {
    made = std::make_unique<Form>(NormalForm::nfkd);
  } else if (type == "Lowercase") {
    made = std::make_unique<Lowercase>();
  } else if (type == "Strip") {
    const bool left = fields.flag("strip_left", true);
    made = std::make_unique<NormalizerStrip>(
        left, fields.flag("strip_right", true));
  } else {
    fields.fail(
        "a normalizer of type " + type +
        " is not known; there are Sequence, Prepend, Replace, NFC, NFD, NFKC, "
        "NFKD, Lowercase and Strip");
  }
  fields.end();
  return made;
}

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

}  // namespace echelon::detail
