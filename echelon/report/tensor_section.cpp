#include "echelon/report/tensor_section.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/collectives.h"
#include "echelon/report/cut_rectangle.h"
#include "echelon/report/cut_region.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr size_t kMaxStripes = 1200;  // of all pictures
constexpr size_t kMaxBlocks = 12;
constexpr size_t kMaxNames = 12;

std::string joined(const std::vector<std::string>& names, const char* between) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kMaxNames; ++i) {
    text += (i == 0 ? "" : between) + names[i];
  }
  if (names.size() > kMaxNames) {
    text += between + std::to_string(names.size() - kMaxNames) + " more";
  }
  return text;
}
// "transformer.h.0 to transformer.h.11" and "12 equal layers".
void draw_caption(Markup& page, const CutBlock& block, const std::string& id) {
  const auto n = block.layers.size();
  std::string title = block.layers.front();
  if (n == 2) title += ", " + block.layers.back();
  if (n > 2) title += " \u2026 " + block.layers.back();
  page.open("figcaption");
  page.leaf("h3", {{"id", id + "-title"}}, title);
  if (n > 1) {
    page.leaf(
        "span", {{"class", "now"}},
        "\u00d7 " + std::to_string(n) + ", all cut alike");
  }
  page.close();
}

// A block and where it stands among the others.
struct Drawing {
  const TensorCut& cut;
  const CutBlock& block;
  std::string id;
  const CutRegion* before = nullptr;  // the last one of an earlier layer
  const CutRegion* after = nullptr;   // the first one of a later layer
  bool is_first = false;
  std::vector<CollectiveCost> costs;
};

void draw_block(Markup& page, const Drawing& drawing) {
  const CutBlock& block = drawing.block;
  const bool is_last = block.layers.back() == drawing.cut.layers.back().name;
  page.open("figure", {{"class", "cut-layer"}, {"id", drawing.id}});
  draw_caption(page, block, drawing.id);
  for (size_t i = 0; i < block.regions.size(); ++i) {
    const bool last = i + 1 == block.regions.size();
    detail::draw_region(
        page, block.regions[i],
        {.cut = drawing.cut,
         .block = block,
         .id = drawing.id + "-" + std::to_string(i),
         .before = i > 0 ? &block.regions[i - 1] : drawing.before,
         .after = last ? drawing.after : &block.regions[i + 1],
         .input_is_data = drawing.is_first && i == 0,
         .is_last = is_last && last,
         .costs = drawing.costs});
  }
  if (!block.cut_vectors.empty()) {
    page.leaf(
        "p", {{"class", "cut-notes"}},
        "Cut with them: " + joined(block.cut_vectors, ", ") + ".");
  }
  if (!block.whole.empty()) {
    page.leaf(
        "p", {{"class", "cut-notes"}},
        "Whole on every rank: " + joined(block.whole, ", ") + ".");
  }
  page.close();
}

// The calls of these layers, with labels within a layer.
std::vector<CollectiveCost>
costs_within(const std::vector<CollectiveCost>& all, const CutBlock& block) {
  std::vector<CollectiveCost> result;
  for (const auto& cost : all) {
    if (cost.axis != "tp") continue;
    for (const auto& layer : block.layers) {
      if (!cost.label.starts_with(layer)) continue;
      std::string rest = cost.label.substr(layer.size());
      if (!rest.empty() && rest[0] != '.' && rest[0] != ' ') continue;
      CollectiveCost own = cost;
      own.label = !rest.empty() && rest[0] == '.' ? rest.substr(1) : rest;
      result.push_back(std::move(own));
      break;
    }
  }
  return result;
}

// About how many rectangles the pictures of a block have.
size_t num_stripes(const CutBlock& block) {
  size_t count = 0;
  for (const auto& region : block.regions) {
    for (const auto* list : {&region.columns, &region.rows}) {
      for (const auto& m : *list) {
        for (const auto& pieces : m.pieces) count += pieces.size() + 1;
      }
    }
  }
  return count;
}

const CutRegion* first_region(const CutBlock& block) {
  return block.regions.empty() ? nullptr : &block.regions.front();
}

const CutRegion* last_region(const CutBlock& block) {
  return block.regions.empty() ? nullptr : &block.regions.back();
}

std::string share_text(const TensorCut& cut) {
  const auto held = held_shares(cut);
  const auto [least, most] = std::minmax_element(held.begin(), held.end());
  std::string text = format_percent(*least);
  if (format_percent(*most) != text) text += " to " + format_percent(*most);
  return text;
}

std::string lead_of(const TensorCut& cut) {
  const std::string ranks = std::to_string(cut.ranks);
  return "Each layer is computed by " + ranks +
         " ranks together; what has a rank\u2019s colour is on that rank. A "
         "rank holds " +
         share_text(cut) + " of the parameters. Between the layers " +
         (cut.cuts_tokens ? "each rank holds some of the tokens"
                          : "every rank holds all of the activations") +
         ".";
}

void draw_keys(Markup& page, const TensorCut& cut) {
  page.open("div", {{"class", "keys under"}});
  for (int64_t rank = 0; rank < cut.ranks && rank < detail::kNumRankColors;
       ++rank) {
    draw_key(
        page, detail::rank_color(rank).c_str(),
        ("rank " + std::to_string(rank)).c_str());
  }
  draw_key(page, "kw", "on every rank");
  page.close();
}

}  // namespace

void draw_tensor_section(
    Markup& page, const TensorCut& cut, const Timeline& timeline,
    const Diagnosis& diagnosis) {
  if (cut.ranks < 2 || cut.layers.empty()) return;
  const auto blocks = cut_blocks(cut);
  const auto costs = collective_costs(timeline, diagnosis);
  page.open("section").leaf("h2", {}, "How the layers are cut");
  page.leaf("p", {{"class", "lead"}}, unbroken(lead_of(cut)));
  draw_keys(page, cut);
  std::vector<std::string> whole;
  size_t drawn = 0;
  size_t stripes = 0;
  size_t left_out = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const CutBlock& block = blocks[i];
    if (block.regions.empty()) {
      whole.insert(whole.end(), block.layers.begin(), block.layers.end());
      continue;
    }
    stripes += num_stripes(block);
    if (drawn > 0 && (drawn == kMaxBlocks || stripes > kMaxStripes)) {
      ++left_out;
      continue;
    }
    draw_block(
        page,
        {.cut = cut,
         .block = block,
         .id = "cut-" + std::to_string(drawn++),
         .before = i > 0 ? last_region(blocks[i - 1]) : nullptr,
         .after = i + 1 < blocks.size() ? first_region(blocks[i + 1]) : nullptr,
         .is_first = i == 0,
         .costs = costs_within(costs, block)});
  }
  if (!whole.empty()) {
    page.leaf(
        "p", {{"class", "note"}},
        "Layers that are whole on every rank: " + joined(whole, ", ") + ".");
  }
  if (left_out > 0) {
    page.leaf(
        "p", {{"class", "note"}},
        "Kinds of layers that are not drawn: " + std::to_string(left_out) +
            ".");
  }
  page.leaf(
      "p", {{"class", "note"}},
      "Parts are to scale along the side that is cut; the numbers in them are "
      "the rank and how many rows or columns it has. X, Y and Z have a row for "
      "each token. Times are means of one layer and step.");
  page.close();
}

}  // namespace echelon
