#include "echelon/storage/s3_text.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "echelon/text/format.h"

namespace echelon::storage {

std::string encoded(std::string_view text, bool keep_slashes) {
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || c == '-' || c == '_' || c == '.' ||
        c == '~' || (c == '/' && keep_slashes)) {
      result += c;
    } else {
      result += format("%{:02X}", unsigned{byte});
    }
  }
  return result;
}

std::string decoded(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      const std::string hex(text.substr(i + 1, 2));
      result += static_cast<char>(std::strtol(hex.c_str(), nullptr, 16));
      i += 2;
    } else {
      result += text[i] == '+' ? ' ' : text[i];
    }
  }
  return result;
}
std::string element(std::string_view xml, const std::string& name) {
  const std::string open = "<" + name + ">";
  const size_t begin = xml.find(open);
  if (begin == std::string_view::npos) return "";
  const size_t end = xml.find("</" + name + ">", begin);
  if (end == std::string_view::npos) return "";
  std::string text(xml.substr(begin + open.size(), end - begin - open.size()));
  constexpr std::pair<const char*, const char*> kEntities[] = {
      {"&quot;", "\""}, {"&#34;", "\""}, {"&lt;", "<"}, {"&gt;", ">"},
      {"&apos;", "'"},  {"&#39;", "'"},  {"&amp;", "&"}};
  for (const auto& [entity, plain] : kEntities) {
    for (size_t at = 0; (at = text.find(entity, at)) != std::string::npos;) {
      text.replace(at, std::strlen(entity), plain);
      at += std::strlen(plain);
    }
  }
  return text;
}

std::vector<std::string_view>
elements(std::string_view xml, const std::string& name) {
  std::vector<std::string_view> found;
  const std::string open = "<" + name + ">";
  const std::string close = "</" + name + ">";
  for (size_t at = 0; (at = xml.find(open, at)) != std::string_view::npos;) {
    const size_t end = xml.find(close, at);
    if (end == std::string_view::npos) break;
    found.push_back(xml.substr(at, end - at));
    at = end;
  }
  return found;
}

}  // namespace echelon::storage
