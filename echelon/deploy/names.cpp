#include "echelon/deploy/names.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::deploy {
namespace {

bool is_lower_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

bool is_letter_or_digit(char c) {
  return is_lower_or_digit(c) || (c >= 'A' && c <= 'Z');
}

bool is_name_of_label(const std::string& text) {
  return !text.empty() && text.size() <= 63 &&
         is_letter_or_digit(text.front()) && is_letter_or_digit(text.back()) &&
         std::ranges::all_of(text, [](char c) {
           return is_letter_or_digit(c) || c == '-' || c == '_' || c == '.';
         });
}

bool is_domain(const std::string& text) {
  return !text.empty() && text.size() <= 253 &&
         is_lower_or_digit(text.front()) && is_lower_or_digit(text.back()) &&
         std::ranges::all_of(
             text,
             [](char c) {
               return is_lower_or_digit(c) || c == '-' || c == '.';
             }) &&
         text.find("..") == std::string::npos &&
         text.find(".-") == std::string::npos &&
         text.find("-.") == std::string::npos;
}

// "07" -> 7; -1: not a number
int64_t number_of(const std::string& text) {
  int64_t number = -1;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && rest == end && text.size() <= 9 &&
                 text.front() != '-'
             ? number
             : -1;
}

// "1:30:00" -> 1, 30, 0; empty: not numbers
std::vector<int64_t> numbers_of(const std::string& text) {
  std::vector<int64_t> numbers;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(':', at), text.size());
    if (end == at) return {};
    numbers.push_back(number_of(text.substr(at, end - at)));
    if (numbers.back() < 0) return {};
    at = end + 1;
  }
  return numbers;
}

}  // namespace

void check_dns_label(
    const std::string& flag, const std::string& text, size_t longest,
    const std::string& because) {
  const bool spelled = !text.empty() && text.front() >= 'a' &&
                       text.front() <= 'z' && is_lower_or_digit(text.back()) &&
                       std::ranges::all_of(text, [](char c) {
                         return is_lower_or_digit(c) || c == '-';
                       });
  if (!spelled) {
    throw ConfigError(format(
        "{} {}: a name in Kubernetes has a to z, 0 to 9 and -, begins with a "
        "letter and does not end with -, as in first-run",
        flag, text));
  }
  if (text.size() <= longest) return;
  throw ConfigError(format(
      "{} {}: has {} characters, but at most {} are possible{}; {} {} fits",
      flag, text, text.size(), longest, because.empty() ? "" : ": " + because,
      flag, text.substr(0, text.find_last_not_of('-', longest - 1) + 1)));
}

void check_object_name(
    const std::string& flag, const std::string& text, bool dots) {
  if (is_domain(text) &&
      (dots || (text.find('.') == std::string::npos && text.size() <= 63))) {
    return;
  }
  throw ConfigError(format(
      "{} {}: a name in Kubernetes has a to z, 0 to 9{} and -, begins and ends "
      "with a letter or digit, and has at most {} characters",
      flag, text, dots ? ", ." : "", dots ? 253 : 63));
}

void check_label_value(const std::string& flag, const std::string& text) {
  if (is_name_of_label(text)) return;
  throw ConfigError(format(
      "{} {}: has at most 63 letters, digits, -, _ and ., and begins and ends "
      "with a letter or digit",
      flag, text));
}

void check_label_key(const std::string& flag, const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos
          ? is_name_of_label(text)
          : is_domain(text.substr(0, slash)) &&
                is_name_of_label(text.substr(slash + 1))) {
    return;
  }
  throw ConfigError(format(
      "{} {}: is the key of a label of nodes, as in nvidia.com/gpu.clique",
      flag, text));
}

void check_word(const std::string& flag, const std::string& text) {
  const bool plain = std::ranges::all_of(
      text, [](char c) { return c > ' ' && c < 127 && c != '"' && c != '\''; });
  if (plain && !text.empty()) return;
  throw ConfigError(format(
      "{} {}: is one word, without spaces and quotes", flag, in_quotes(text)));
}

int64_t parse_time_limit(const std::string& flag, const std::string& text) {
  const size_t dash = text.find('-');
  const auto parts =
      numbers_of(dash == std::string::npos ? text : text.substr(dash + 1));
  int64_t seconds = 0;
  if (dash != std::string::npos) {  // DAYS-HOURS[:MINUTES[:SECONDS]]
    const int64_t days = dash == 0 ? -1 : number_of(text.substr(0, dash));
    if (days >= 0 && !parts.empty() && parts.size() <= 3) {
      seconds = days * 86400;
      const int64_t units[] = {3600, 60, 1};
      for (size_t i = 0; i < parts.size(); ++i) seconds += parts[i] * units[i];
    }
  } else if (!parts.empty() && parts.size() <= 3) {
    // MINUTES, MINUTES:SECONDS or HOURS:MINUTES:SECONDS
    for (const int64_t part : parts) seconds = 60 * seconds + part;
    if (parts.size() == 1) seconds *= 60;
  }
  if (seconds > 0) return seconds;
  throw ConfigError(format(
      "{} {}: write it as Slurm does: minutes (90), HH:MM:SS (1:30:00), or "
      "DAYS-HOURS (2-12)",
      flag, text));
}

}  // namespace echelon::deploy
