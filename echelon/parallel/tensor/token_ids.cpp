#include "echelon/parallel/tensor/token_ids.h"

#include <torch/types.h>
#include <torch/utils.h>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::detail {
namespace {

using torch::Tensor;

[[noreturn]] void refuse(
    const Tensor& ids, const Tensor& wrong, int64_t vocabulary,
    const std::string& place) {
  const int64_t first =
      wrong.flatten().to(torch::kUInt8).argmax().item<int64_t>();
  const int64_t value = ids.flatten()[first].item<int64_t>();
  const std::string where = ids.dim() == 2
                                ? format(
                                      "token {} of sample {}",
                                      first % ids.size(1), first / ids.size(1))
                                : format("token {}", first);
  throw DataError(format(
      "[{}] {} is {}, but the vocabulary has ids 0 to {}; use the tokenizer "
      "that belongs to the model, or a larger vocabulary",
      place, where, value, vocabulary - 1));
}

}  // namespace

Tensor in_range(const Tensor& ids, const IndexRange& range) {
  return ids.ge(range.begin).bitwise_and_(ids.lt(range.end));
}

void check_ids(
    const Tensor& ids, int64_t vocabulary, const std::string& place,
    std::optional<int64_t> ignored) {
  if (ids.is_meta() || ids.numel() == 0) return;
  const torch::NoGradGuard no_grad;
  if (ids.is_cpu() && !ignored) {
    const auto [least, largest] = ids.aminmax();
    if (least.item<int64_t>() >= 0 && largest.item<int64_t>() < vocabulary) {
      return;
    }
  }
  auto right = in_range(ids, {0, vocabulary});
  if (ignored) right.bitwise_or_(ids.eq(*ignored));
  if (!ids.is_cpu()) {
    at::_assert_async(
        right.all(), "[" + place + "] a token id is outside of the vocabulary");
    return;
  }
  if (right.all().item<bool>()) return;
  refuse(ids, right.bitwise_not(), vocabulary, place);
}

Tensor
local_ids(const Tensor& ids, const IndexRange& range, int64_t otherwise) {
  const auto local = ids - range.begin;
  return local.masked_fill_(in_range(ids, range).bitwise_not(), otherwise);
}

}  // namespace echelon::detail
