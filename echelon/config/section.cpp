// Each type of target has an overload of a few small functions: assign() reads
// a TOML value, text_of() writes it, type_of() names the type, numbers_of() and
// size_of() give what rules look at; on() picks the overload. A Field records
// its default, reads its key and checks each rule as the rule is added. After
// the first broken one (failed_) the others are recorded for the reference, but
// not checked, so that a key has one error.
#include "echelon/config/section.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "echelon/config/byte_size.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::config {
namespace {

using std::chrono::milliseconds;
using Kind = Value::Kind;

// assign() returns "", or the rule that the value breaks.

std::string assign(bool& target, const Value& value) {
  if (value.kind != Kind::boolean) return "must be true or false";
  target = value.boolean;
  return "";
}

std::string assign(int64_t& target, const Value& value) {
  if (value.kind != Kind::integer) return "must be a whole number";
  target = value.integer;
  return "";
}

std::string assign(uint64_t& target, const Value& value) {
  if (value.kind != Kind::integer) return "must be a whole number";
  if (value.integer < 0) return "must be at least 0";
  target = static_cast<uint64_t>(value.integer);
  return "";
}

std::string assign(double& target, const Value& value) {
  if (value.kind != Kind::real && value.kind != Kind::integer) {
    return "must be a number";
  }
  const double number = value.kind == Kind::real
                            ? value.real
                            : static_cast<double>(value.integer);
  if (!std::isfinite(number)) return "must be a finite number";
  target = number;
  return "";
}

std::string assign(std::string& target, const Value& value) {
  if (value.kind != Kind::string) {
    return "must be a string; put it in quotes: " +
           toml_text(shortened(value.text()));
  }
  if (value.string.find('\0') != std::string::npos) {
    return "must not contain a zero character";
  }
  target = value.string;
  return "";
}

std::string type_of(const Bytes&) {
  return "bytes";
}
std::string type_of(const BytesList&) {
  return "list of bytes";
}
template <class T>
std::string type_of(const T&) {
  if constexpr (std::is_same_v<T, bool>) return "true or false";
  if constexpr (std::is_integral_v<T>) return "whole number";
  if constexpr (std::is_same_v<T, double>) return "number";
  if constexpr (std::is_same_v<T, std::string>) return "string";
  return "time";
}
template <class T>
std::string type_of(const std::vector<T>&) {
  return "list of " + type_of(T()) + "s";
}

template <class T>
std::string assign(std::vector<T>& target, const Value& value) {
  const std::string rule =
      "must be a " + type_of(target) + ", as in [" +
      (std::is_same_v<T, std::string> ? "\"a\", \"b\"" : "1, 2") + "]";
  if (value.kind != Kind::array) return rule;
  std::vector<T> items;
  for (const auto& item : value.items) {
    T made{};
    if (!assign(made, item).empty()) {
      return rule + "; " + shortened(item.text(), 30) + " is not one";
    }
    items.push_back(made);
  }
  target = items;
  return "";
}

struct Unit {
  std::string_view name;
  int64_t milliseconds;
};
constexpr Unit kUnits[] = {
    {"ms", 1}, {"h", 3600000}, {"m", 60000}, {"s", 1000}};
constexpr double kLongestMs = 1e12;  // 31 years

std::string assign(milliseconds& target, const Value& value) {
  const std::string rule =
      "must be a time such as \"500ms\", \"30s\", \"10m\" or \"2h\"";
  double amount = 0;
  int64_t unit = 1000;
  if (value.kind == Kind::string) {
    size_t digits = 0;
    try {
      amount = std::stod(value.string, &digits);
    } catch (const std::exception&) {
      return rule;
    }
    const std::string name = value.string.substr(digits);
    const auto* found = std::ranges::find(kUnits, name, &Unit::name);
    if (found == std::end(kUnits)) return rule;
    unit = found->milliseconds;
  } else if (!assign(amount, value).empty()) {
    return rule;
  }
  const double product = amount * static_cast<double>(unit);
  if (!(product >= 0 && product <= kLongestMs)) {
    return rule + ", not negative and at most 31 years";
  }
  target = milliseconds(std::llround(product));
  return "";
}

constexpr const char* kBytesRule =
    "a size such as \"48GiB\", \"512 MiB\", \"2GB\", or a number of bytes";

std::string assign(const Bytes& target, const Value& value) {
  const std::string rule = std::string("must be ") + kBytesRule;
  if (value.kind == Kind::string) {
    const auto bytes = parse_bytes(value.string);
    if (!bytes) return rule;
    target.value() = *bytes;
    return "";
  }
  return assign(target.value(), value).empty() ? "" : rule;
}

std::string assign(const BytesList& target, const Value& value) {
  const std::string rule =
      "must be a list of sizes, as in [\"16 GiB\", \"24 GiB\"]";
  if (value.kind != Kind::array) return rule;
  std::vector<int64_t> items;
  for (const auto& item : value.items) {
    int64_t bytes = 0;
    if (!assign(Bytes(bytes), item).empty()) {
      return rule + "; " + shortened(item.text(), 30) + " is not one";
    }
    items.push_back(bytes);
  }
  target.value() = items;
  return "";
}

template <class T>
std::string text_of(const T& value) {
  if constexpr (std::is_same_v<T, uint64_t>) {
    return std::to_string(value);
  } else {
    return toml_text(value);
  }
}
std::string text_of(milliseconds value) {
  if (value.count() == 0) return "\"0s\"";
  // The largest unit of which the time is a whole multiple reads best.
  for (const char* name : {"h", "m", "s", "ms"}) {
    for (const auto& unit : kUnits) {
      if (unit.name == name && value.count() % unit.milliseconds == 0) {
        return format("\"{}{}\"", value.count() / unit.milliseconds, name);
      }
    }
  }
  return "";
}
template <class T>
std::string text_of(const std::vector<T>& values) {
  const auto text = [](const T& value) { return text_of(value); };
  return "[" + join(values, ", ", text) + "]";
}

std::string text_of(const Bytes& bytes) {
  const std::string text = bytes_text(bytes.value());
  return text.find(' ') == std::string::npos ? text : toml_text(text);
}
std::string text_of(const BytesList& list) {
  const auto text = [](int64_t bytes) { return text_of(Bytes(bytes)); };
  return "[" + join(list.value(), ", ", text) + "]";
}

// The value in the unit of its bounds, or that of each item; empty where
// bounds make no sense.
template <class T>
std::vector<double> numbers_of(const T& value) {
  if constexpr (std::is_same_v<T, milliseconds>) {
    return {static_cast<double>(value.count()) / 1000};
  } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    return {static_cast<double>(value)};
  }
  return {};
}
template <class T>
std::vector<double> numbers_of(const std::vector<T>& values) {
  std::vector<double> numbers;
  if constexpr (std::is_arithmetic_v<T>) {
    numbers.assign(values.begin(), values.end());
  }
  return numbers;
}

template <class T>
std::vector<double> numbers_of(const InBytes<T>& bytes) {
  return numbers_of(bytes.value());
}

template <class T>
size_t size_of(const T&) {
  return 1;
}
size_t size_of(const std::string& value) {
  return value.size();
}
template <class T>
size_t size_of(const std::vector<T>& values) {
  return values.size();
}
template <class T>
size_t size_of(const InBytes<T>& bytes) {
  return size_of(bytes.value());
}

std::string number_text(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15) {
    return std::to_string(static_cast<int64_t>(value));
  }
  return toml_text(value);
}

// Our name of a dtype or method that has several, if it is a choice.
std::string
usual_name(const std::string& word, const std::vector<std::string>& choices) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"bfloat16", "bf16"},   {"float16", "fp16"},   {"half", "fp16"},
      {"fp32", "float32"},    {"float", "float32"},  {"fp64", "float64"},
      {"double", "float64"},  {"full", "all"},       {"imagefolder", "images"},
      {"imagenet", "images"}, {"synthetic", "dummy"}};
  for (const auto& [name, ours] : kNames) {
    if (word == name && std::ranges::find(choices, ours) != choices.end()) {
      return ours;
    }
  }
  return word;
}

// Calls `function` with the variable that the target refers to.
template <class Function>
auto on(const Target& target, const Function& function) {
  return std::visit([&](auto held) { return function(held.get()); }, target);
}

std::string text_of(const Target& target) {
  return on(target, [](const auto& value) { return text_of(value); });
}

}  // namespace

Field::Field(Document& document, Entry& entry, Target target)
    : document_(document), entry_(entry), target_(target) {
  entry_.type = on(target_, [](const auto& value) { return type_of(value); });
  entry_.default_value = text_of(target_);
  entry_.value = entry_.default_value;
  written_ = entry_.value;
  read(entry_.key);
}

void Field::read(const std::string& key) {
  const Key* found = document_.find(entry_.table, key);
  if (found == nullptr) return;
  const Value& value = found->value;
  const std::string rule =
      on(target_, [&](auto& target) { return assign(target, value); });
  entry_.place = value.place;
  if (!rule.empty()) return refuse(value.place, value.text(), rule);
  entry_.value = text_of(target_);
  written_ = value.text();
}

void Field::refuse(
    const Place& place, const std::string& value, const std::string& rule) {
  failed_ = true;
  const std::string begin =
      place.is_default()
          ? (document_.name().empty() ? "" : document_.name() + ": ")
          : place.text() + ": ";
  document_.problem(
      place, format(
                 "{}[{}] {} = {}: {}", begin, entry_.table, entry_.key,
                 shortened(value), rule));
}

void Field::require(
    bool holds, const std::string& rule, const std::string& way_out) {
  entry_.rules.push_back(rule);
  if (!failed_ && !holds) {
    refuse(entry_.place, written_, "must be " + rule + way_out);
  }
}

std::string Field::bound_text(double bound) const {
  if (entry_.type != "time") return number_text(bound);
  return text_of(milliseconds(std::llround(bound * 1000)));
}

Field& Field::within(const Bounds& bounds) {
  const auto numbers =
      on(target_, [](const auto& value) { return numbers_of(value); });
  const auto keep = [&](const std::optional<double>& bound, const char* words,
                        const auto& keeps) {
    if (!bound) return;
    require(
        std::ranges::all_of(
            numbers, [&](double number) { return keeps(number, *bound); }),
        words + bound_text(*bound), "");
  };
  keep(bounds.at_least, "at least ", std::greater_equal<>());
  keep(bounds.above, "above ", std::greater<>());
  keep(bounds.at_most, "at most ", std::less_equal<>());
  keep(bounds.below, "below ", std::less<>());
  return *this;
}

Field& Field::one_of(const std::vector<std::string>& choices) {
  std::string all;
  bool holds = false;
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string text = text_of(choices[i]);
    if (i > 0) all += i + 1 == choices.size() ? " or " : ", ";
    all += text;
    entry_.choices.push_back(text);
    holds = holds || entry_.value == text;
  }
  if (!failed_ && !holds) {
    std::string word = entry_.value;
    if (word.size() >= 2) word = word.substr(1, word.size() - 2);
    refuse(
        entry_.place, entry_.value,
        "must be " + all + did_you_mean(usual_name(word, choices), choices));
  }
  return *this;
}

Field& Field::length(size_t smallest, size_t largest) {
  const std::string range = smallest == largest ? std::to_string(smallest)
                            : largest == std::numeric_limits<size_t>::max()
                                ? format("{} or more", smallest)
                                : format("{} to {}", smallest, largest);
  const size_t size =
      on(target_, [](const auto& value) { return size_of(value); });
  require(
      size >= smallest && size <= largest, "a list of " + range,
      ", not of " + std::to_string(size));
  return *this;
}

Field& Field::not_empty() {
  entry_.rules.push_back("not empty");
  if (!failed_ &&
      on(target_, [](const auto& value) { return size_of(value); }) == 0) {
    refuse(entry_.place, written_, "must not be empty");
  }
  return *this;
}

Field& Field::rule(const std::function<std::string()>& broken) {
  if (failed_) return *this;
  if (const auto text = broken(); !text.empty()) {
    refuse(entry_.place, written_, text);
  }
  return *this;
}

Field& Field::also(const std::string& other_key) {
  document_.aliases_[entry_.table + "." + other_key] = entry_.key;
  const Key* found = document_.find(entry_.table, other_key);
  if (found == nullptr) return *this;
  if (document_.find(entry_.table, entry_.key) != nullptr) {
    const bool flag = !entry_.place.flag.empty();
    const bool other_flag = !found->place.flag.empty();
    if (flag && !other_flag) return *this;  // the command line wins
    if (flag == other_flag) {
      failed_ = true;
      document_.problem(
          found->place, format(
                            "{}: [{}] {} = {}: is another name of {}, which is "
                            "also set; keep one of the two",
                            found->place.text(), entry_.table, other_key,
                            shortened(found->value.text()), entry_.key));
      return *this;
    }
  }
  read(other_key);
  return *this;
}

Field Section::field(
    const std::string& key, Target target, const std::string& help,
    const Bounds& bounds) {
  Entry& entry = document_.entries_.emplace_back();
  entry.table = table_;
  entry.key = key;
  entry.help = help;
  Field field(document_, entry, target);
  using Unsigned = std::reference_wrapper<uint64_t>;
  if (const auto* value = std::get_if<Unsigned>(&target)) {
    // TOML's whole numbers end there.
    constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
    field.require(true, "at least 0", "");
    field.require(*value <= kLargest, "at most 2^63 - 1", "");
  }
  return field.within(bounds);
}

}  // namespace echelon::config
