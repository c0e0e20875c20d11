// Assertions on the text of a page; matchers would print the whole page when
// they fail.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace echelon::report::sample {

inline bool contains(const std::string& page, const std::string& part) {
  return page.find(part) != std::string::npos;
}

inline size_t count(const std::string& page, const std::string& part) {
  size_t result = 0;
  for (size_t at = 0; (at = page.find(part, at)) != std::string::npos; ++at) {
    ++result;
  }
  return result;
}

inline void expect_parts(
    const std::string& page, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) EXPECT_TRUE(contains(page, part)) << part;
}

inline void expect_no_parts(
    const std::string& page, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) EXPECT_FALSE(contains(page, part)) << part;
}

}  // namespace echelon::report::sample
