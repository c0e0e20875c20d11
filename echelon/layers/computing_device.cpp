#include "echelon/layers/computing_device.h"

#include <utility>

namespace echelon {
namespace {

thread_local torch::DeviceType counted_for = torch::kCPU;

}  // namespace

torch::DeviceType computing_device(const torch::Tensor& tensor) {
  const auto type = tensor.device().type();
  return type == torch::kMeta ? counted_for : type;
}

CountedFor::CountedFor(torch::DeviceType device)
    : outer_(std::exchange(counted_for, device)) {}

CountedFor::~CountedFor() {
  counted_for = outer_;
}

}  // namespace echelon
