#include "echelon/report/tensor_shards.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace echelon::report {
namespace {

bool is_sharded(const ParameterShards& parameter) {
  return std::ranges::any_of(parameter.parts, [](const Shard& part) {
    return part.local_shape() != part.shape;
  });
}

// "attn.c_attn" of "attn.c_attn.weight".
std::string parent_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

bool is_embedding(const std::string& name) {
  return std::ranges::any_of(
      std::array{"wte", "embed", "word_embeddings", "vocab"},
      [&](const char* word) { return name.find(word) != std::string::npos; });
}

const ParameterShards*
bias_of(const LayerShards& layer, const std::string& module) {
  const std::string name = module.empty() ? "bias" : module + ".bias";
  for (const auto& parameter : layer.parameters) {
    if (parameter.name == name && !parameter.parts.empty() &&
        parameter.parts[0].shape.size() == 1) {
      return &parameter;
    }
  }
  return nullptr;
}

ShardedMatrix
matrix_of(const LayerShards& layer, const ParameterShards& parameter) {
  ShardedMatrix matrix;
  const auto& shape = parameter.parts.front().shape;
  matrix.name = parent_of(parameter.name);
  matrix.kernel.assign(shape.begin() + 2, shape.end());
  const int64_t dim = parameter.parts.front().dim;
  const ParameterShards* bias =
      matrix.kernel.empty() ? bias_of(layer, matrix.name) : nullptr;
  const std::string full =
      layer.name + (matrix.name.empty() ? "" : "." + matrix.name);
  int64_t out_dim = 0;
  if (bias != nullptr && is_sharded(*bias)) {
    matrix.sharded_by = ShardedBy::columns;
    out_dim = dim;
  } else if (bias != nullptr) {
    matrix.sharded_by = ShardedBy::rows;
    out_dim = 1 - dim;
  } else if (dim == 0 && matrix.kernel.empty() && is_embedding(full)) {
    matrix.sharded_by = ShardedBy::vocabulary;
    out_dim = 1;
  } else {
    matrix.sharded_by = dim == 0 ? ShardedBy::columns : ShardedBy::rows;
  }
  matrix.outputs = shape[static_cast<size_t>(out_dim)];
  matrix.inputs = shape[static_cast<size_t>(1 - out_dim)];
  for (const auto& part : parameter.parts) matrix.pieces.push_back(part.pieces);
  return matrix;
}

// The modules that all names have in common: "attn".
std::string common_name(const ShardedRegion& region) {
  std::vector<std::string> names;
  for (const auto& m : region.columns) names.push_back(m.name);
  for (const auto& m : region.rows) names.push_back(m.name);
  if (names.size() == 1) return names.front();
  std::string common = parent_of(names.front());
  const auto begins = [&](const std::string& name) {
    return common.empty() || name.starts_with(common + ".");
  };
  while (!std::ranges::all_of(names, begins)) common = parent_of(common);
  return common;
}

// A matrix sharded by rows ends the region that the columns of its input began.
void add_matrix(std::vector<ShardedRegion>& regions, ShardedMatrix matrix) {
  const bool begins = matrix.sharded_by == ShardedBy::columns;
  const bool open = !regions.empty() && regions.back().rows.empty();
  const bool alone = matrix.sharded_by == ShardedBy::vocabulary;
  if (alone || !open) regions.emplace_back();
  auto& list = begins ? regions.back().columns : regions.back().rows;
  list.push_back(std::move(matrix));
}

ShardedBlock block_of(const LayerShards& layer) {
  ShardedBlock block{.layers = {layer.name}};
  for (const auto& parameter : layer.parameters) {
    if (parameter.parts.empty()) continue;
    if (!is_sharded(parameter)) {
      block.replicated.push_back(parameter.name);
    } else if (parameter.parts.front().shape.size() < 2) {
      block.sharded_vectors.push_back(parameter.name);
    } else {
      add_matrix(block.regions, matrix_of(layer, parameter));
    }
  }
  for (auto& region : block.regions) region.name = common_name(region);
  return block;
}

bool same_parameters(const LayerShards& a, const LayerShards& b) {
  return std::ranges::equal(
      a.parameters, b.parameters, [](const auto& p, const auto& q) {
        return p.name == q.name && p.parts == q.parts;
      });
}

int64_t numel(const std::vector<int64_t>& shape) {
  return std::accumulate(
      shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

std::vector<ShardedBlock> sharded_blocks(const TensorShards& model) {
  std::vector<ShardedBlock> blocks;
  std::vector<const LayerShards*> first;  // of each block
  for (const auto& layer : model.layers) {
    const auto same = std::ranges::find_if(first, [&](const auto* other) {
      return same_parameters(*other, layer) &&
             is_embedding(other->name) == is_embedding(layer.name);
    });
    if (same != first.end()) {
      blocks[static_cast<size_t>(same - first.begin())].layers.push_back(
          layer.name);
      continue;
    }
    first.push_back(&layer);
    blocks.push_back(block_of(layer));
  }
  return blocks;
}

std::vector<double> held_shares(const TensorShards& model) {
  std::vector<double> held(static_cast<size_t>(model.ranks), 0);
  double all = 0;
  for (const auto& layer : model.layers) {
    for (const auto& parameter : layer.parameters) {
      if (parameter.tied || parameter.parts.empty()) continue;
      all += static_cast<double>(numel(parameter.parts.front().shape));
      for (size_t r = 0; r < held.size() && r < parameter.parts.size(); ++r) {
        held[r] += static_cast<double>(numel(parameter.parts[r].local_shape()));
      }
    }
  }
  for (auto& value : held) value = all > 0 ? value / all : 0;
  return held;
}

}  // namespace echelon::report
