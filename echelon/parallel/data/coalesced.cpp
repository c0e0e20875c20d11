#include "echelon/parallel/data/coalesced.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace echelon {
namespace {

using torch::Tensor;

constexpr int64_t kLargeBytes = 256 << 10;

bool is_sent_alone(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() &&
         tensor.numel() * static_cast<int64_t>(tensor.element_size()) >=
             kLargeBytes;
}

void broadcast_small(
    const std::vector<Tensor>& tensors, int source, const Group& group,
    const std::string& label) {
  std::vector<Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  Tensor buffer = torch::cat(flat);
  group.broadcast(buffer, source, {.label = label}).wait();
  if (group.rank() == source) return;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(buffer.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

}  // namespace

void broadcast_tensors(
    const std::vector<Tensor>& tensors, int source, const Group& group,
    const std::string& label) {
  if (group.size() == 1) return;
  torch::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<Tensor>> small;
  for (const auto& tensor : tensors) {
    const Tensor data = tensor.detach();
    if (data.numel() == 0) continue;
    if (!is_sent_alone(data)) {
      small[data.scalar_type()].push_back(data);
      continue;
    }
    group
        .broadcast(
            data.as_strided({data.numel()}, {1}, data.storage_offset()), source,
            {.label = label})
        .wait();
  }
  for (const auto& [_, same_dtype] : small) {
    broadcast_small(same_dtype, source, group, label);
  }
}

std::vector<std::vector<std::string>> gather_lines(
    const std::vector<std::string>& lines, const Group& group,
    torch::Device device, const std::string& label) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  const auto bytes = static_cast<int64_t>(text.size());
  Tensor longest = torch::full({1}, bytes, torch::kInt64).to(device);
  group.all_reduce(longest, ReduceOp::max, {.label = label}).wait();
  const int64_t width = longest.item<int64_t>() + 1;  // ends with a zero

  Tensor own = torch::zeros({width}, torch::kUInt8);
  std::memcpy(own.mutable_data_ptr<uint8_t>(), text.data(), text.size());
  own = own.to(device);
  Tensor all = torch::empty({group.size() * width}, own.options());
  group.all_gather(all, own, {.label = label}).wait();
  all = all.cpu();
  std::vector<std::vector<std::string>> result(group.size());
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string other(reinterpret_cast<const char*>(
        all.const_data_ptr<uint8_t>() + rank * width));
    size_t begin = 0;
    for (size_t end; (end = other.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      result[rank].push_back(other.substr(begin, end - begin));
    }
  }
  return result;
}

std::vector<int64_t> sum_numbers(
    const std::vector<int64_t>& numbers, const Group& group,
    torch::Device device, const std::string& label) {
  const Tensor sums = torch::tensor(numbers, torch::kInt64).to(device);
  group.all_reduce(sums, ReduceOp::sum, {.label = label}).wait();
  return to_numbers(sums);
}

std::vector<int64_t> to_numbers(const Tensor& tensor) {
  const Tensor host = tensor.cpu();
  const auto* first = host.const_data_ptr<int64_t>();
  return {first, first + host.numel()};
}

}  // namespace echelon
