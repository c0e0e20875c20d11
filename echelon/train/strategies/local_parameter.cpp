// A local parameter is a tensor, its tensor-parallel shard if it has one, and,
// with sharded data parallelism, a range of the flattened shard. Ranks may hold
// the same elements; a norm must count each once, so CountedElements lists the
// elements that the shard owns within the range.
#include "echelon/train/strategies/local_parameter.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

namespace echelon {
namespace {

// With more pieces than this, views cost more than an index_select.
constexpr size_t kManyPieces = 8;

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= sizes[i];
  return product;
}

// Where the indices `owned` are in the concatenation of shard.pieces.
IndexRange place_of(const IndexRange& owned, const Shard& shard) {
  int64_t at = 0;
  for (const auto& piece : shard.pieces) {
    if (owned.begin >= piece.begin && owned.end <= piece.end) {
      const int64_t begin = at + owned.begin - piece.begin;
      return {begin, begin + owned.size()};
    }
    at += piece.size();
  }
  return {};
}

// The elements of the local tensor, row-major and ascending, that the shard
// owns.
std::vector<IndexRange> owned_elements(const Shard& shard) {
  const auto shape = shard.local_shape();
  const int64_t all = product(shape, 0, shape.size());
  if (shard.owned == shard.pieces) return {{0, all}};
  if (shape.empty()) {
    return shard.owned.empty() ? std::vector<IndexRange>{}
                               : std::vector<IndexRange>{{0, 1}};
  }
  const auto dim = static_cast<size_t>(shard.dim);
  const int64_t outer = product(shape, 0, dim);
  const int64_t inner = product(shape, dim + 1, shape.size());
  std::vector<IndexRange> places;
  for (const auto& owned : shard.owned) {
    places.push_back(place_of(owned, shard));
  }
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) {
    return a.begin < b.begin;
  });
  std::vector<IndexRange> elements;
  for (int64_t row = 0; row < outer; ++row) {
    const int64_t base = row * shape[dim] * inner;
    for (const auto& place : places) {
      elements.push_back(
          {base + place.begin * inner, base + place.end * inner});
    }
  }
  return elements;
}

// The overlaps with `range` that are not empty, counted from its beginning.
std::vector<IndexRange>
within(const std::vector<IndexRange>& elements, const IndexRange& range) {
  std::vector<IndexRange> pieces;
  for (const auto& one : elements) {
    const int64_t begin = std::max(one.begin, range.begin);
    const int64_t end = std::min(one.end, range.end);
    if (begin < end) pieces.push_back({begin - range.begin, end - range.begin});
  }
  return pieces;
}

torch::Tensor indices_of(const std::vector<IndexRange>& pieces) {
  std::vector<torch::Tensor> indices;
  for (const auto& piece : pieces) {
    indices.push_back(torch::arange(piece.begin, piece.end, torch::kInt64));
  }
  return torch::cat(indices);
}

int64_t size_of(const std::vector<IndexRange>& pieces) {
  int64_t size = 0;
  for (const auto& piece : pieces) size += piece.size();
  return size;
}

}  // namespace

torch::Tensor
local_values(const torch::Tensor& full, const LocalParameter& part) {
  torch::Tensor local = part.shard ? slice_of(full, part.shard->shard) : full;
  if (!part.range) return local;
  return local.reshape(-1).narrow(0, part.range->begin, part.range->size());
}

void copy_into_full(
    torch::Tensor full, const torch::Tensor& values,
    const LocalParameter& part) {
  const torch::NoGradGuard no_grad;
  if (!part.range) {
    if (part.shard) return copy_into_full(full, values, part.shard->shard);
    full.copy_(values);
    return;
  }
  // Elements of the shard that other ranks have stay as they are in `full`.
  torch::Tensor local = part.shard ? slice_of(full, part.shard->shard) : full;
  const torch::Tensor flat = local.contiguous().view(-1);
  flat.narrow(0, part.range->begin, part.range->size()).copy_(values);
  if (part.shard) {
    copy_into_full(full, flat.view(local.sizes()), part.shard->shard);
  } else if (!flat.is_alias_of(full)) {
    full.copy_(flat.view(full.sizes()));
  }
}

CountedElements::CountedElements(
    const std::vector<LocalParameter>& parts, int tensor_rank,
    const std::set<std::string>& leave_out) {
  for (const auto& part : parts) {
    const int64_t size = part.value.numel();
    const IndexRange range = part.range.value_or(IndexRange{0, size});
    Counted counted;
    if (!leave_out.contains(part.name)) {
      if (part.shard) {
        counted.pieces = within(owned_elements(part.shard->shard), range);
      } else if (tensor_rank == 0 && size > 0) {
        counted.pieces = {{0, size}};
      }
    }
    counted.all = size_of(counted.pieces) == size;
    if (!counted.all && counted.pieces.size() > kManyPieces) {
      counted.indices = indices_of(counted.pieces).to(part.value.device());
    }
    counted_.push_back(std::move(counted));
  }
}

PartitionedGradients CountedElements::partition(
    const std::vector<LocalParameter>& parts, SumOverRanks sum) const {
  PartitionedGradients shared{.sum = std::move(sum)};
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& gradient = parts[i].gradient;
    const auto& which = counted_.at(i);
    if (!gradient.defined() || which.pieces.empty()) continue;
    const auto add = [&](torch::Tensor counted) {
      shared.counted.push_back(std::move(counted));
      shared.parts.push_back(i);
    };
    if (which.all) {
      add(gradient);
      continue;
    }
    const auto flat = gradient.reshape(-1);
    if (which.indices.defined()) {
      add(flat.index_select(0, which.indices));
      continue;
    }
    for (const auto& piece : which.pieces) {
      add(flat.narrow(0, piece.begin, piece.size()));
    }
  }
  return shared;
}

int64_t CountedElements::num_counted(size_t i) const {
  return size_of(counted_.at(i).pieces);
}

}  // namespace echelon
