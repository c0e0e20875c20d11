// The library's parser sends events, which are kept as tokens with their texts
// in one string, up to the first error. The walk then takes token after token
// and compares it with what the caller asks for. So a wrong byte is reported
// when the walk comes to it, with the place that the walk knows.
#include "echelon/checkpoint/format/json_reader.h"

#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr size_t kMaxDepth = 8;

}  // namespace

/// What the parser sees, kept in its order up to the first error.
class JsonReader::Events {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  explicit Events(JsonReader& reader) : reader_(reader) {}

  bool null() { return add(Kind::null); }
  bool boolean(bool value) {
    return add_text(Kind::boolean, value ? "true" : "false");
  }
  bool number_integer(number_integer_t value) {
    add(Kind::negative);
    reader_.tokens_.back().negative = value;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) {
    return add(Kind::whole, value);
  }
  bool number_float(number_float_t value, const string_t& text) {
    add_text(Kind::number, text);
    reader_.texts_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }
  bool string(string_t& value) { return add_text(Kind::string, value); }
  bool binary(binary_t&) { return false; }  // never in texts
  bool start_object(size_t) { return deeper(Kind::object); }
  bool key(string_t& name) { return add_text(Kind::key, name); }
  bool end_object() { return higher(Kind::end_object); }
  bool start_array(size_t) { return deeper(Kind::array); }
  bool end_array() { return higher(Kind::end_array); }
  bool parse_error(
      size_t position, const std::string&, const nlohmann::json::exception&) {
    add(Kind::invalid, position);
    return false;
  }

 private:
  bool add(Kind kind, uint64_t value = 0) {
    reader_.tokens_.push_back({kind, 0, {value}});
    return true;
  }
  bool add_text(Kind kind, std::string_view text) {
    if (text.size() > std::numeric_limits<uint32_t>::max()) {
      throw CheckpointError(reader_.path_ + ": a text of more than 4 GiB");
    }
    add(kind);
    reader_.tokens_.back().length = static_cast<uint32_t>(text.size());
    reader_.tokens_.back().begin = reader_.texts_.size();
    reader_.texts_ += text;
    return true;
  }
  bool deeper(Kind kind) {
    if (++depth_ <= kMaxDepth) return add(kind);
    add(Kind::too_deep);
    return false;
  }
  bool higher(Kind kind) {
    --depth_;
    return add(kind);
  }

  JsonReader& reader_;
  size_t depth_ = 0;
};

JsonReader::JsonReader(
    std::string_view text, const std::string& path, std::string_view part)
    : path_(path), part_(part) {
  Events events(*this);
  if (nlohmann::json::sax_parse(text.begin(), text.end(), &events)) {
    tokens_.push_back({Kind::end, 0, {0}});
  }
}

void JsonReader::check(const Token& token) const {
  if (token.kind == Kind::too_deep) {
    throw CheckpointError(
        format("{}: nested deeper than {} levels", path_, kMaxDepth));
  }
  if (token.kind != Kind::invalid) return;
  throw CheckpointError(format(
      "{}: {}not valid JSON in UTF-8: byte {}{}", path_,
      part_.empty() ? "" : format("its {} is ", part_), token.whole,
      part_.empty() ? "" : " of the " + part_));
}

void JsonReader::check_syntax() const {
  check(tokens_.back());
}

const JsonReader::Token& JsonReader::look() const {
  check(tokens_[at_]);
  return tokens_[at_];
}

std::string_view JsonReader::text_of(const Token& token) const {
  return std::string_view(texts_).substr(token.begin, token.length);
}

std::string_view JsonReader::text() const {
  return text_of(look());
}

double JsonReader::number_of(const Token& token) const {
  double value = 0;
  std::memcpy(&value, texts_.data() + token.begin + token.length, sizeof value);
  return value;
}

std::string JsonReader::kind_name() const {
  static constexpr std::array kNames = {"an object", "the end of the object",
                                        "an array",  "the end of the array",
                                        "a key",     "a string",
                                        "a number",  "a number",
                                        "a number",  "true or false",
                                        "null",      "the end"};
  return kNames.at(static_cast<size_t>(next()));
}

std::string JsonReader::shown() const {
  const Token& token = look();
  switch (token.kind) {
    case Kind::key:
      return "the key " + safetensors::quote_printable(text_of(token));
    case Kind::string:
      return safetensors::quote_printable(text_of(token));
    case Kind::whole:
      return std::to_string(token.whole);
    case Kind::negative:
      return std::to_string(token.negative);
    case Kind::number:
      return nlohmann::json(number_of(token)).dump();
    case Kind::boolean:
      return std::string(text_of(token));
    default:
      return kind_name();
  }
}

void JsonReader::fail(const std::string& what) const {
  std::string place;
  for (const auto& [key, index] : places_) {
    if (!key.empty()) {
      place += (place.empty() ? "" : ".") + std::string(key);
    } else if (index >= 0) {
      place += format("[{}]", index);
    }
  }
  throw CheckpointError(
      path_ + ": " + (place.empty() ? "" : place + ": ") + what);
}

const JsonReader::Token& JsonReader::take(Kind kind, const char* rule) {
  if (next() != kind) fail(shown() + "; it must be " + rule);
  return tokens_[at_++];
}

void JsonReader::open_object() {
  take(Kind::object, "an object");
  places_.push_back({});
}

void JsonReader::key(std::string_view name) {
  places_.back() = {};
  if (next() != Kind::key || text() != name) {
    fail(
        shown() + " in place of the key " + safetensors::quote_printable(name) +
        "; each key is there once, in the format's order");
  }
  ++at_;
  places_.back().key = name;
}

void JsonReader::close_object() {
  places_.back() = {};
  if (next() != Kind::end_object) {
    fail("unknown, or there already: " + shown());
  }
  ++at_;
  places_.pop_back();
}

bool JsonReader::next_member(std::string& name) {
  const Token& token = look();
  ++at_;
  if (token.kind == Kind::end_object) {
    places_.pop_back();
    return false;
  }
  name = text_of(token);
  places_.back().key = text_of(token);
  return true;
}

void JsonReader::open_array() {
  take(Kind::array, "an array");
  places_.push_back({});
}

bool JsonReader::next_item() {
  if (next() == Kind::end_array) {
    ++at_;
    places_.pop_back();
    return false;
  }
  ++places_.back().index;
  return true;
}

std::string JsonReader::string() {
  return std::string(text_of(take(Kind::string, "a text")));
}

uint64_t JsonReader::whole() {
  return take(Kind::whole, "a whole number of 0 to 2^64 - 1").whole;
}

int64_t JsonReader::count() {
  const char* rule = "a whole number of 0 to 2^63 - 1";
  const uint64_t value = take(Kind::whole, rule).whole;
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    fail(format("{}; it must be {}", value, rule));
  }
  return static_cast<int64_t>(value);
}

double JsonReader::number() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Token& token = look();
  ++at_;
  if (token.kind == Kind::whole) return static_cast<double>(token.whole);
  if (token.kind == Kind::negative) return static_cast<double>(token.negative);
  if (token.kind == Kind::number) return number_of(token);
  if (token.kind == Kind::string) {
    const auto text = text_of(token);
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return kInfinity;
    if (text == "-inf") return -kInfinity;
  }
  --at_;
  fail(shown() + "; it must be a number, \"nan\", \"inf\" or \"-inf\"");
}

bool JsonReader::is_null() {
  if (next() != Kind::null) return false;
  ++at_;
  return true;
}

void JsonReader::end() {
  take(Kind::end, "the end");
}

}  // namespace echelon
