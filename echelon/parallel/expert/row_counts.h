// How many rows each expert of a mixture has. The numbers come into being on
// the device. The host learns them only where it must know sizes.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace echelon {

/// Copies share the numbers.
class RowCounts {
 public:
  /// Numbers that the host has.
  explicit RowCounts(std::vector<int64_t> counts);
  /// int64 [experts], on a device. Nothing waits for them.
  explicit RowCounts(torch::Tensor counts);

  /// The numbers; the first call waits for a copy of them.
  const std::vector<int64_t>& on_host() const;
  /// int64 [experts] on `device`, where they are, if they are on one.
  torch::Tensor on(torch::Device device) const;
  /// Where each expert's rows end: int32 [experts] on `device`.
  torch::Tensor ends_on(torch::Device device) const;

 private:
  struct Numbers;
  std::shared_ptr<Numbers> numbers_;
};

}  // namespace echelon
