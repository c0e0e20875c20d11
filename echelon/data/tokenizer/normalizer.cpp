#include "echelon/data/tokenizer/components.h"

#include "echelon/data/tokenizer/json_fields.h"

namespace echelon::detail {
namespace {

Normalizer in_form(NormalForm form) {
  return [form](std::string& text) { text = normal_form(text, form); };
}

void strip(std::string& text, bool left, bool right) {
  size_t begin = 0, end = 0, at = 0;
  bool leading = true;
  while (at < text.size()) {
    const bool space = is_space(next_character(text, at));
    if (space && leading) begin = at;
    if (!space) end = at;
    leading = leading && space;
  }
  if (!left) begin = 0;
  if (!right) end = text.size();
  text = begin < end ? text.substr(begin, end - begin) : "";
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
      strip(text, left, right);
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

}  // namespace echelon::detail
