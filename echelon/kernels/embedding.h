// The gradient of a table of embeddings, for GPUs: tokens are sorted by id
// once, and each row of the table is written once, with the sum of its tokens
// or with zeros. It is an operator of LibTorch's dispatcher, so counts and
// profiles see it as one, and on meta tensors it gives shapes.
#pragma once

#include <torch/types.h>

namespace echelon::kernels {

/// Sorted tokens whose rows are summed first where all are of one id, so that a
/// frequent id does not take longer than all others.
inline constexpr int64_t kTokenChunk = 64;

/// Whether embedding_gradient() takes rows like `x`: float32, bfloat16 or
/// float16 on a GPU that has the kernels (uses_kernels), or meta tensors that
/// stand for such.
bool takes_embedding(const torch::Tensor& x);

/// out[r] = the sum of gradient[i] over the tokens i with ids[i] == r, in
/// float32 and in an order that depends on the ids alone, rounded once. Two
/// calls give the same bits. Ids outside of [0, rows) are left out.
///
///   gradient  [..., width]
///   ids       [...], int32 or int64
///   padding   a row that stays 0; -1: none
///
/// Returns [rows, width], like `gradient`.
torch::Tensor embedding_gradient(
    const torch::Tensor& gradient, const torch::Tensor& ids, int64_t rows,
    int64_t padding = -1);

/// Tokens sorted by id.
struct SortedTokens {
  torch::Tensor ids;    // [tokens], rising
  torch::Tensor order;  // [tokens], the token of each; equal ids keep theirs
  torch::Tensor first;  // [rows + 1], the place where each row's tokens begin
};
SortedTokens sort_tokens(const torch::Tensor& ids, int64_t rows);

}  // namespace echelon::kernels
