#include "echelon/checkpoint/format/json_reader.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr size_t kMaxDepth = 8;

}  // namespace

/// What the parser sees, kept in its order.
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
    return add_text(Kind::other, value ? "true" : "false");
  }
  bool number_integer(number_integer_t value) {
    add(Kind::negative);
    reader_.tokens_.back().negative = value;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) {
    add(Kind::whole);
    reader_.tokens_.back().whole = value;
    return true;
  }
  bool number_float(number_float_t value, const string_t&) {
    add(Kind::number);
    reader_.tokens_.back().number = value;
    return true;
  }
  bool string(string_t& value) { return add_text(Kind::string, value); }
  bool binary(binary_t&) { return add_text(Kind::other, "binary"); }
  bool start_object(size_t) { return deeper(Kind::object); }
  bool key(string_t& name) { return add_text(Kind::key, name); }
  bool end_object() { return higher(Kind::end_object); }
  bool start_array(size_t) { return deeper(Kind::array); }
  bool end_array() { return higher(Kind::end_array); }
  bool parse_error(
      size_t position, const std::string&, const nlohmann::json::exception&) {
    throw CheckpointError(format(
        "{}: not valid JSON in UTF-8: byte {}", reader_.path_, position));
  }

 private:
  bool add(Kind kind) {
    reader_.tokens_.push_back({kind, 0, {0}});
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
    if (++depth_ > kMaxDepth) {
      throw CheckpointError(
          format("{}: nested deeper than {} levels", reader_.path_, kMaxDepth));
    }
    return add(kind);
  }
  bool higher(Kind kind) {
    --depth_;
    return add(kind);
  }

  JsonReader& reader_;
  size_t depth_ = 0;
};

JsonReader::JsonReader(const std::string& text, const std::string& path)
    : path_(path) {
  Events events(*this);
  nlohmann::json::sax_parse(text, &events);
  tokens_.push_back({Kind::end, 0, {0}});
}

std::string_view JsonReader::text_of(const Token& token) const {
  return std::string_view(texts_).substr(token.begin, token.length);
}

std::string JsonReader::shown(const Token& token) const {
  switch (token.kind) {
    case Kind::object:
      return "an object";
    case Kind::array:
      return "an array";
    case Kind::end_object:
      return "the end of the object";
    case Kind::end_array:
      return "the end of the array";
    case Kind::key:
      return "the key " + safetensors::quote_printable(text_of(token));
    case Kind::string:
      return safetensors::quote_printable(text_of(token));
    case Kind::whole:
      return std::to_string(token.whole);
    case Kind::negative:
      return std::to_string(token.negative);
    case Kind::number:
      return nlohmann::json(token.number).dump();
    case Kind::other:
      return std::string(text_of(token));
    case Kind::null:
      return "null";
    case Kind::end:
      break;
  }
  return "the end";
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
  const Token& token = tokens_[at_];
  if (token.kind != kind) fail(shown(token) + "; it must be " + rule);
  ++at_;
  return token;
}

void JsonReader::open_object() {
  take(Kind::object, "an object");
  places_.push_back({});
}

void JsonReader::key(std::string_view name) {
  const Token& token = tokens_[at_];
  places_.back() = {};
  if (token.kind != Kind::key || text_of(token) != name) {
    fail(
        shown(token) + " in place of the key " +
        safetensors::quote_printable(name) +
        "; each key is there once, in the format's order");
  }
  ++at_;
  places_.back().key = name;
}

void JsonReader::close_object() {
  places_.back() = {};
  if (tokens_[at_].kind != Kind::end_object) {
    fail("unknown, or there already: " + shown(tokens_[at_]));
  }
  ++at_;
  places_.pop_back();
}

bool JsonReader::next_member(std::string& name) {
  const Token& token = tokens_[at_++];
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
  if (tokens_[at_].kind == Kind::end_array) {
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
  const Token& token = tokens_[at_];
  switch (token.kind) {
    case Kind::whole:
      ++at_;
      return static_cast<double>(token.whole);
    case Kind::negative:
      ++at_;
      return static_cast<double>(token.negative);
    case Kind::number:
      ++at_;
      return token.number;
    default:
      break;
  }
  const std::string text =
      token.kind == Kind::string ? std::string(text_of(token)) : "";
  if (text != "nan" && text != "inf" && text != "-inf") {
    fail(shown(token) + "; it must be a number, \"nan\", \"inf\" or \"-inf\"");
  }
  ++at_;
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? kInfinity : -kInfinity;
}

bool JsonReader::is_null() {
  if (tokens_[at_].kind != Kind::null) return false;
  ++at_;
  return true;
}

void JsonReader::end() {
  take(Kind::end, "the end");
}

}  // namespace echelon
