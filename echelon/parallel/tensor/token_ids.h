// Checks token ids against a vocabulary. For the .cpp files of this folder.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "echelon/layout/shard.h"

namespace echelon::detail {

/// Throws DataError for the first of `ids` that is not in [0, vocabulary) and
/// not `ignored`: "[place] token 7 of sample 2 is 50300, …" for ids [batch,
/// sequence], else by index. On a GPU it is an assertion on the device, without
/// waiting.
void check_ids(
    const torch::Tensor& ids, int64_t vocabulary, const std::string& place,
    std::optional<int64_t> ignored = std::nullopt);

/// Rows of the ids in a table of `range`; `otherwise` for ids outside of it.
torch::Tensor
local_ids(const torch::Tensor& ids, const IndexRange& range, int64_t otherwise);

/// True for each id in `range`.
torch::Tensor in_range(const torch::Tensor& ids, const IndexRange& range);

}  // namespace echelon::detail
