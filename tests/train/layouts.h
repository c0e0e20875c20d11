// Layouts as --layout has them.
#pragma once

#include <initializer_list>
#include <vector>

#include "echelon/layout/layout.h"

namespace echelon {

inline std::vector<Layout>
parse_layouts(std::initializer_list<const char*> texts) {
  std::vector<Layout> all;
  for (const char* text : texts) all.push_back(parse_layout(text));
  return all;
}

}  // namespace echelon
