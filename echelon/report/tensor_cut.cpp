#include "echelon/report/tensor_cut.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace echelon {
namespace {

bool is_cut(const CutParameter& parameter) {
  return std::any_of(
      parameter.parts.begin(), parameter.parts.end(),
      [](const Shard& part) { return part.local_shape() != part.shape; });
}

// "attn.c_attn" of "attn.c_attn.weight".
std::string parent_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

bool is_table_of_words(const std::string& name) {
  for (const char* word : {"wte", "embed", "word_embeddings", "vocab"}) {
    if (name.find(word) != std::string::npos) return true;
  }
  return false;
}

const CutParameter* bias_of(const CutLayer& layer, const std::string& module) {
  const std::string name = module.empty() ? "bias" : module + ".bias";
  for (const auto& parameter : layer.parameters) {
    if (parameter.name == name && !parameter.parts.empty() &&
        parameter.parts[0].shape.size() == 1) {
      return &parameter;
    }
  }
  return nullptr;
}

CutMatrix matrix_of(const CutLayer& layer, const CutParameter& parameter) {
  CutMatrix matrix;
  const auto& shape = parameter.parts.front().shape;
  matrix.name = parent_of(parameter.name);
  matrix.kernel.assign(shape.begin() + 2, shape.end());
  const int64_t dim = parameter.parts.front().dim;
  const CutParameter* bias =
      matrix.kernel.empty() ? bias_of(layer, matrix.name) : nullptr;
  const std::string full =
      layer.name + (matrix.name.empty() ? "" : "." + matrix.name);
  int64_t out_dim = 0;
  if (bias != nullptr && is_cut(*bias)) {
    matrix.cut = MatrixCut::columns;
    out_dim = dim;
  } else if (bias != nullptr) {
    matrix.cut = MatrixCut::rows;
    out_dim = 1 - dim;
  } else if (dim == 0 && matrix.kernel.empty() && is_table_of_words(full)) {
    matrix.cut = MatrixCut::vocabulary;
    out_dim = 1;
  } else {
    matrix.cut = dim == 0 ? MatrixCut::columns : MatrixCut::rows;
  }
  matrix.outputs = shape[static_cast<size_t>(out_dim)];
  matrix.inputs = shape[static_cast<size_t>(1 - out_dim)];
  for (const auto& part : parameter.parts) matrix.pieces.push_back(part.pieces);
  return matrix;
}

// What all names begin with, in whole words: "attn".
std::string common_name(const CutRegion& region) {
  std::vector<std::string> names;
  for (const auto& m : region.columns) names.push_back(m.name);
  for (const auto& m : region.rows) names.push_back(m.name);
  if (names.size() == 1) return names.front();
  std::string common = parent_of(names.front());
  const auto begins = [&](const std::string& name) {
    return common.empty() || name.starts_with(common + ".");
  };
  while (!std::all_of(names.begin(), names.end(), begins)) {
    common = parent_of(common);
  }
  return common;
}

// A matrix cut by rows ends the region that its input's columns began.
void add_matrix(std::vector<CutRegion>& regions, CutMatrix matrix) {
  const bool begins = matrix.cut == MatrixCut::columns;
  const bool open = !regions.empty() && regions.back().rows.empty();
  const bool alone = matrix.cut == MatrixCut::vocabulary;
  if (alone || !open) regions.emplace_back();
  auto& list = begins ? regions.back().columns : regions.back().rows;
  list.push_back(std::move(matrix));
}

CutBlock block_of(const CutLayer& layer) {
  CutBlock block{.layers = {layer.name}};
  for (const auto& parameter : layer.parameters) {
    if (parameter.parts.empty()) continue;
    if (!is_cut(parameter)) {
      block.whole.push_back(parameter.name);
    } else if (parameter.parts.front().shape.size() < 2) {
      block.cut_vectors.push_back(parameter.name);
    } else {
      add_matrix(block.regions, matrix_of(layer, parameter));
    }
  }
  for (auto& region : block.regions) region.name = common_name(region);
  return block;
}

bool same_parameters(const CutLayer& a, const CutLayer& b) {
  return std::equal(
      a.parameters.begin(), a.parameters.end(), b.parameters.begin(),
      b.parameters.end(), [](const CutParameter& p, const CutParameter& q) {
        return p.name == q.name && p.parts == q.parts;
      });
}

int64_t numel(const std::vector<int64_t>& shape) {
  return std::accumulate(
      shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

std::vector<CutBlock> cut_blocks(const TensorCut& cut) {
  std::vector<CutBlock> blocks;
  std::vector<const CutLayer*> first;  // of each block
  for (const auto& layer : cut.layers) {
    const auto same =
        std::find_if(first.begin(), first.end(), [&](const CutLayer* other) {
          return same_parameters(*other, layer) &&
                 is_table_of_words(other->name) ==
                     is_table_of_words(layer.name);
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

std::vector<double> held_shares(const TensorCut& cut) {
  std::vector<double> held(static_cast<size_t>(cut.ranks), 0);
  double all = 0;
  for (const auto& layer : cut.layers) {
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

}  // namespace echelon
