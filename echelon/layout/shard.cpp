#include "echelon/layout/shard.h"

#include <algorithm>
#include <utility>

namespace echelon {

std::vector<int64_t> Shard::local_shape() const {
  std::vector<int64_t> local = shape;
  if (local.empty()) return local;
  int64_t size = 0;
  for (const auto& piece : pieces) size += piece.size();
  local[static_cast<size_t>(dim)] = size;
  return local;
}

Shard replicated(std::vector<int64_t> shape, int rank) {
  Shard shard{.shape = std::move(shape)};
  const IndexRange all{0, shard.shape.empty() ? 1 : shard.shape[0]};
  shard.pieces = {all};
  if (rank == 0) shard.owned = {all};
  return shard;
}

IndexRange even_range(int64_t total, int64_t part, int64_t parts) {
  const int64_t small = total / parts;
  const int64_t larger = total % parts;
  const int64_t begin = part * small + std::min(part, larger);
  return {begin, begin + small + (part < larger ? 1 : 0)};
}

Shard even_shard(
    std::vector<int64_t> shape, int64_t dim, int64_t part, int64_t parts) {
  Shard shard{.shape = std::move(shape), .dim = dim};
  const int64_t total = shard.shape[static_cast<size_t>(dim)];
  shard.pieces = {even_range(total, part, parts)};
  shard.owned = shard.pieces;
  return shard;
}

}  // namespace echelon
