// Rows of stacked bars on one scale, as a figure: memory by kind, a step by
// what it is spent on.
#pragma once

#include <string>
#include <vector>

#include "echelon/report/markup.h"

namespace echelon {

struct StackedPart {
  std::string color;  // a fill of the report's style: "bw"
  std::string name;   // in the legend; of one name, one colour
  double value = 0;
  std::string text;  // "12.5 ms", shown while pointed at
};

struct StackedRow {
  std::string name;
  std::string total;  // beside the name
  std::vector<StackedPart> parts;
  double limit = 0;  // of this one; 0: that of all

  double sum() const;
};

struct StackedBars {
  std::string id;  // unique in the page
  std::string title;
  std::string description;  // for those who do not see it
  std::vector<StackedRow> rows;
  double whole = 0;  // what the width stands for; 0: the longest row
  double limit = 0;  // a vertical line; 0: none
  std::string limit_name;
};

/// Bars beyond `whole` are cut off; parts that nobody would see are left out.
void draw_stacked_bars(Markup& page, const StackedBars& bars);

}  // namespace echelon
