#include "echelon/parallel/expert/row_counts.h"

#include <torch/types.h>

#include <utility>

#include "echelon/layers/host_copy.h"

namespace echelon {

struct RowCounts::Numbers {
  std::vector<int64_t> host;  // empty: not copied yet
  torch::Tensor device;       // undefined: they are of the host
};

RowCounts::RowCounts(std::vector<int64_t> counts)
    : numbers_(std::make_shared<Numbers>(Numbers{std::move(counts), {}})) {}

RowCounts::RowCounts(torch::Tensor counts)
    : numbers_(std::make_shared<Numbers>(Numbers{{}, std::move(counts)})) {}

const std::vector<int64_t>& RowCounts::on_host() const {
  auto& host = numbers_->host;
  if (host.empty() && numbers_->device.defined()) {
    HostCopy copy({numbers_->device});
    const auto counts = copy.wait().front().contiguous();
    const auto* begin = counts.const_data_ptr<int64_t>();
    host.assign(begin, begin + counts.numel());
  }
  return host;
}

torch::Tensor RowCounts::on(torch::Device device) const {
  if (numbers_->device.defined()) return numbers_->device;
  return to_device(torch::tensor(numbers_->host, torch::kInt64), device);
}

torch::Tensor RowCounts::ends_on(torch::Device device) const {
  const torch::NoGradGuard no_grad;
  return on(device).cumsum(0).to(torch::kInt32);
}

}  // namespace echelon
