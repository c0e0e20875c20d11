// A strict reader of JSON: of our own files, whose objects have fixed keys in a
// fixed order, and of safetensors headers. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

/// Walks through a text, one value after the other:
///
///   JsonReader json(text, path);
///   json.open_object();
///   json.key("shape");
///   for (json.open_array(); json.next_item();) shape.push_back(json.count());
///   json.close_object();
///   json.end();
///
/// Anything else in the text throws CheckpointError with path, place
/// ("tensors[3].shape[0]"), value and rule. A text that is not JSON in UTF-8,
/// or is nested deeper than our files, is refused when the walk comes to the
/// first wrong byte, or by check_syntax().
class JsonReader {
 public:
  enum class Kind {
    object,
    end_object,
    array,
    end_array,
    key,
    string,
    whole,
    negative,  // a whole number below 0
    number,    // any other
    boolean,
    null,
    end,
    invalid,  // no JSON in UTF-8 from here on
    too_deep,
  };

  /// The text need not outlive the constructor.
  ///
  ///   part  of the file that the text is, for messages; empty: all of it
  JsonReader(
      std::string_view text, const std::string& path,
      std::string_view part = "");
  /// Throws CheckpointError unless all of the text is JSON in UTF-8.
  void check_syntax() const;

  void open_object();
  /// The next key must be `name`.
  void key(std::string_view name);
  void close_object();
  /// For objects with any keys: returns false after the last member, and closes
  /// the object.
  bool next_member(std::string& name);

  void open_array();
  /// Returns false after the last item, and closes the array.
  bool next_item();

  std::string string();
  /// A whole number of 64 bits.
  uint64_t whole();
  /// A whole number below 2^63.
  int64_t count();
  /// A number, or "nan", "inf" or "-inf".
  double number();
  /// Whether null is next; consumes it.
  bool is_null();
  void end();

  /// What is next in the text.
  Kind next() const { return look().kind; }
  /// "an array", and the next value in a message.
  std::string kind_name() const;
  std::string shown() const;
  /// The next number, string or key as it is written.
  std::string_view text() const;

  /// Throws CheckpointError: path, place of the value read last, `what`.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct Token {
    Kind kind;
    uint32_t length = 0;  // of its text, in texts_
    union {
      uint64_t whole;
      int64_t negative;
      size_t begin;  // in texts_; a number's text is followed by its value
    };
  };
  struct Place {
    std::string_view key;  // empty: an array's item
    int64_t index = -1;
  };
  class Events;

  const Token& look() const;
  const Token& take(Kind kind, const char* rule);
  std::string_view text_of(const Token& token) const;
  double number_of(const Token& token) const;
  void check(const Token& token) const;

  std::string path_;
  std::string part_;
  std::vector<Token> tokens_;
  std::string texts_;
  size_t at_ = 0;
  std::vector<Place> places_;
};

}  // namespace echelon
