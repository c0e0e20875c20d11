// JSON whose reader knows what comes next: objects with fixed keys in a fixed
// order, as our own files have them. Not for others.
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
/// What the text has in place of what is asked for throws CheckpointError with
/// path, place ("tensors[3].shape[0]"), value and rule. The text need not
/// outlive the constructor.
class JsonReader {
 public:
  /// Throws CheckpointError for a text that is not JSON in UTF-8, or that is
  /// nested deeper than any of ours.
  JsonReader(const std::string& text, const std::string& path);

  void open_object();
  /// The next member's key has to be `name`.
  void key(std::string_view name);
  void close_object();
  /// For objects with keys of any name: false, and the object is closed, after
  /// the last one.
  bool next_member(std::string& name);

  void open_array();
  /// False, and the array is closed, after the last item.
  bool next_item();

  std::string string();
  /// A whole number of 64 bits.
  uint64_t whole();
  /// A whole number below 2^63.
  int64_t count();
  /// A number, or "nan", "inf" or "-inf".
  double number();
  /// Whether null is next, which is then behind us.
  bool is_null();
  void end();

  /// Throws CheckpointError: path, the place of the value read last, `what`.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  enum class Kind {
    object,
    end_object,
    array,
    end_array,
    key,
    string,
    whole,
    negative,  // a whole number below 0
    number,
    other,  // what our files do not have: its text shows it
    null,
    end
  };
  struct Token {
    Kind kind;
    uint32_t length = 0;  // of its text, in texts_
    union {
      uint64_t whole;
      int64_t negative;
      double number;
      size_t begin;
    };
  };
  struct Place {
    std::string_view key;  // empty: an array's item
    int64_t index = -1;
  };
  class Events;

  const Token& take(Kind kind, const char* rule);
  std::string_view text_of(const Token& token) const;
  std::string shown(const Token& token) const;

  std::string path_;
  std::vector<Token> tokens_;
  std::string texts_;
  size_t at_ = 0;
  std::vector<Place> places_;
};

}  // namespace echelon
