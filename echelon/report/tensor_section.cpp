#include "echelon/report/sections.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/collectives.h"
#include "echelon/report/page.h"
#include "echelon/report/shard_picture.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

constexpr size_t kMaxStripes = 1200;  // of all pictures
constexpr size_t kMaxBlocks = 12;
constexpr size_t kMaxNames = 12;

std::string first_names(std::vector<std::string> names) {
  const size_t more = names.size() - std::min(names.size(), kMaxNames);
  names.resize(names.size() - more);
  if (more > 0) names.push_back(format("{} more", more));
  return join(names, ", ");
}

// "transformer.h.0 to transformer.h.11" and "12 equal layers".
void draw_caption(
    Markup& page, const ShardedBlock& block, const std::string& id) {
  const auto n = block.layers.size();
  std::string title = block.layers.front();
  if (n == 2) title += ", " + block.layers.back();
  if (n > 2) title += " \u2026 " + block.layers.back();
  page.add("<figcaption><h3 id='{}-title'>{}</h3>", id, title);
  if (n > 1) {
    page.add("<span class='now'>\u00d7 {}, all sharded alike</span>", n);
  }
  page.add("</figcaption>");
}

// The end of the region that a call serves, by its label within a layer
// ("attn.c_attn input gradient").
enum class Place { elsewhere, enter, leave };

Place place_of(
    const ShardedRegion& region, const std::string& label, bool shards_tokens) {
  const size_t space = label.find(' ');
  const std::string name = label.substr(0, space);
  const std::string what =
      space == std::string::npos ? "" : label.substr(space + 1);
  const auto has = [&](const std::vector<ShardedMatrix>& matrices) {
    return std::ranges::find(matrices, name, &ShardedMatrix::name) !=
           matrices.end();
  };
  if (has(region.rows)) return Place::leave;
  if (has(region.columns)) {
    const bool outputs =
        region.rows.empty() &&
        (what == "loss" || (what == "gather" && !shards_tokens));
    return outputs ? Place::leave : Place::enter;
  }
  const bool part = name == region.name ||
                    (name.starts_with(region.name) && !region.name.empty() &&
                     name[region.name.size()] == '.');
  if (!part) return Place::elsewhere;
  const bool sums = what == "sum" || what == "scatter" || what == "loss";
  return sums || region.columns.empty() ? Place::leave : Place::enter;
}

// `costs` are the calls of the layers of the block.
detail::RegionCosts costs_of(
    const std::vector<CollectiveCost>& costs, const ShardedRegion& region,
    size_t num_layers, bool shards_tokens) {
  detail::RegionCosts result;
  const auto layers = static_cast<double>(num_layers);
  for (const auto& cost : costs) {
    const Place place = place_of(region, cost.label, shards_tokens);
    if (place == Place::elsewhere) continue;
    const bool backward = cost.pass == "backward";
    auto& to = place == Place::enter
                   ? (backward ? result.enter_backward : result.enter_forward)
                   : (backward ? result.leave_backward : result.leave_forward);
    to.seconds += cost.seconds / layers;
    to.bytes += cost.bytes / layers;
  }
  return result;
}

const ShardedRegion* first_region(const ShardedBlock& block) {
  return block.regions.empty() ? nullptr : &block.regions.front();
}

const ShardedRegion* last_region(const ShardedBlock& block) {
  return block.regions.empty() ? nullptr : &block.regions.back();
}

// `costs` are the calls of the layers of the block, which is number `index`.
void draw_block(
    Markup& page, const TensorShards& model,
    const std::vector<ShardedBlock>& blocks, size_t index,
    const std::string& id, const std::vector<CollectiveCost>& costs) {
  const ShardedBlock& block = blocks[index];
  const bool is_last = block.layers.back() == model.layers.back().name;
  const auto* before = index > 0 ? last_region(blocks[index - 1]) : nullptr;
  const auto* after =
      index + 1 < blocks.size() ? first_region(blocks[index + 1]) : nullptr;
  page.add("<figure class='shard-layer' id='{}'>", id);
  draw_caption(page, block, id);
  for (size_t i = 0; i < block.regions.size(); ++i) {
    const bool last = i + 1 == block.regions.size();
    detail::draw_region(
        page, block.regions[i],
        {.model = model,
         .block = block,
         .id = format("{}-{}", id, i),
         .before = i > 0 ? &block.regions[i - 1] : before,
         .after = last ? after : &block.regions[i + 1],
         .input_is_data = index == 0 && i == 0,
         .is_last = is_last && last,
         .costs = costs_of(
             costs, block.regions[i], block.layers.size(),
             model.shards_tokens)});
  }
  if (!block.sharded_vectors.empty()) {
    page.add(
        "<p class='shard-notes'>Sharded with them: {}.</p>",
        first_names(block.sharded_vectors));
  }
  if (!block.replicated.empty()) {
    page.add(
        "<p class='shard-notes'>Replicated on every rank: {}.</p>",
        first_names(block.replicated));
  }
  page.add("</figure>");
}

// The calls of these layers, with labels within a layer.
std::vector<CollectiveCost> costs_within(
    const std::vector<CollectiveCost>& all, const ShardedBlock& block) {
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
size_t num_stripes(const ShardedBlock& block) {
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

std::string share_text(const TensorShards& model) {
  const auto held = held_shares(model);
  const auto [least, most] = std::ranges::minmax(held);
  std::string text = format_percent(least);
  if (format_percent(most) != text) text += " to " + format_percent(most);
  return text;
}

std::string lead_of(const TensorShards& model) {
  return format(
      "Each layer is computed by {} ranks together; what has a rank\u2019s "
      "colour is on that rank. A rank holds {} of the parameters. Between the "
      "layers {}.",
      model.ranks, share_text(model),
      model.shards_tokens ? "each rank holds some of the tokens"
                          : "every rank holds all of the activations");
}

void draw_keys(Markup& page, const TensorShards& model) {
  page.add("<div class='keys under'>");
  for (int64_t rank = 0; rank < model.ranks && rank < detail::kNumRankColors;
       ++rank) {
    draw_key(page, detail::rank_color(rank), format("rank {}", rank));
  }
  draw_key(page, "kw", "on every rank");
  page.add("</div>");
}

}  // namespace

void draw_tensor_section(
    Markup& page, const TensorShards& model, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis) {
  if (model.ranks < 2 || model.layers.empty()) return;
  const auto blocks = sharded_blocks(model);
  const auto costs = collective_costs(timeline, diagnosis);
  page.add(
      "<section id='sharded'><h2>How the layers are sharded</h2><p "
      "class='lead'>{}</p>",
      unbroken(lead_of(model)));
  draw_keys(page, model);
  std::vector<std::string> replicated;
  size_t drawn = 0;
  size_t stripes = 0;
  size_t left_out = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const ShardedBlock& block = blocks[i];
    if (block.regions.empty()) {
      replicated.insert(
          replicated.end(), block.layers.begin(), block.layers.end());
      continue;
    }
    stripes += num_stripes(block);
    if (drawn > 0 && (drawn == kMaxBlocks || stripes > kMaxStripes)) {
      ++left_out;
      continue;
    }
    draw_block(
        page, model, blocks, i, format("shards-{}", drawn++),
        costs_within(costs, block));
  }
  if (!replicated.empty()) {
    page.add(
        "<p class='note'>Layers that are replicated on every rank: {}.</p>",
        first_names(replicated));
  }
  if (left_out > 0) {
    page.add(
        "<p class='note'>Kinds of layers that are not drawn: {}.</p>",
        left_out);
  }
  page.add(
      "<p class='note'>Parts are to scale along the sharded side; the "
      "numbers in them are the rank and how many rows or columns it has. X, Y "
      "and Z have a row for each token. Times are means of one layer and "
      "step.</p></section>");
}

}  // namespace echelon::report
