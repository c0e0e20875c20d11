// One matrix, or the activations beside it, as a rectangle in which each rank's
// part has its colour; what tensor_section.h draws layers from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/layout/shard.h"
#include "echelon/report/markup.h"

namespace echelon::detail {

constexpr int kNumRankColors = 8;

/// The class of a rank's colour; a ninth rank begins anew.
std::string rank_color(int64_t rank);

/// "rank 0", "ranks 0, 1", "ranks 0–3".
std::string ranks_text(const std::vector<int64_t>& ranks);

/// "768 × 2,304".
std::string size_text(int64_t rows, int64_t columns);

using Pieces = std::vector<std::vector<IndexRange>>;  // by rank

/// `width` and `height` in pixels; parts along the side that is cut are to
/// scale.
struct Rectangle {
  std::string id;  // unique in the page
  std::string title;
  std::string description;
  double width = 0;
  double height = 0;
  bool vertical = true;  // stripes side by side; else one above the other
  int64_t size = 0;      // along the side that is cut
  Pieces pieces;         // none: whole, on every rank
  std::vector<std::string> groups;  // names of the ranges of each rank
};

/// An SVG picture. Ranges that several ranks have are shared out among them
/// across the other side. Each part says its rank and size where it has room.
void draw_rectangle(Markup& page, const Rectangle& rectangle);

}  // namespace echelon::detail
