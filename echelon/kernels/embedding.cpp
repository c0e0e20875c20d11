#include "echelon/kernels/embedding.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/kernels/dispatcher.h"
#include "echelon/kernels/kernel_source.h"
#include "echelon/kernels/numbers.h"

namespace echelon::kernels {
namespace {

using torch::Tensor;

constexpr int64_t kEmbeddingThreads = 256;  // of a block, at most: embedding.cu

Tensor table_like(const Tensor& gradient, int64_t rows) {
  return torch::empty({rows, gradient.size(-1)}, gradient.options());
}

Tensor embedding_gradient_on_gpu(
    const Tensor& given, const Tensor& ids, int64_t rows, int64_t padding) {
  const auto gradient = given.contiguous();
  auto out = table_like(gradient, rows);
  if (out.numel() == 0) return out;
  int64_t width = gradient.size(-1);
  const auto tokens = sort_tokens(ids, rows);
  const int64_t chunks = tokens.ids.numel() / kTokenChunk;
  const auto partial =
      torch::empty({chunks, width}, gradient.options().dtype(torch::kFloat32));
  const int64_t packet = packet_of(gradient);
  const bool packets = width % packet == 0 && begins_a_packet(gradient);
  const auto suffix =
      number_suffix(gradient.scalar_type()) + (packets ? "_packets" : "");
  const int64_t accesses = packets ? width / packet : width;
  const auto threads =
      static_cast<int>(std::min(kEmbeddingThreads, (accesses + 31) / 32 * 32));
  const void* from = gradient.const_data_ptr();
  const void* sorted = tokens.ids.const_data_ptr();
  const void* order = tokens.order.const_data_ptr();
  const void* first = tokens.first.const_data_ptr();
  void* sums = partial.mutable_data_ptr();
  void* to = out.mutable_data_ptr();
  const c10::DeviceGuard guard(gradient.device());
  const auto& source = embedding_source().text;
  if (chunks > 0) {
    std::array<void*, 5> arguments = {&from, &sorted, &order, &sums, &width};
    launch_kernel(
        source, "sum_chunks" + suffix, chunks, threads, arguments.data());
  }
  std::array<void*, 7> arguments = {&from, &order, &first,  &sums,
                                    &to,   &width, &padding};
  launch_kernel(source, "sum_rows" + suffix, rows, threads, arguments.data());
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def(
      "embedding_gradient(Tensor gradient, Tensor ids, int rows, int padding) "
      "-> Tensor");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("embedding_gradient", embedding_gradient_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl(
      "embedding_gradient",
      [](const Tensor& gradient, const Tensor&, int64_t rows, int64_t) {
        return table_like(gradient, rows);
      });
}

bool takes_embedding(const Tensor& x) {
  return is_kernel_number(x.scalar_type()) &&
         uses_kernels(embedding_source(), x);
}

Tensor embedding_gradient(
    const Tensor& gradient, const Tensor& ids, int64_t rows, int64_t padding) {
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&, int64_t, int64_t)>(
          "echelon::embedding_gradient");
  return op.call(gradient, ids, rows, padding);
}

SortedTokens sort_tokens(const Tensor& ids, int64_t rows) {
  const auto [sorted, order] = at::sort(
      ids.flatten().to(torch::kInt64), /*stable=*/true, /*dim=*/0,
      /*descending=*/false);
  return {
      sorted, order,
      at::searchsorted(sorted, torch::arange(rows + 1, sorted.options()))};
}

}  // namespace echelon::kernels
