// Reads the tensors of a weights file or Hugging Face folder piece by piece.
// Free of LibTorch.
#pragma once

#include <string>
#include <vector>

#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// Pages of a mapped file are released after they were read.
class MappedTensors : public TensorSource {
 public:
  explicit MappedTensors(WeightsSource weights);

  const std::string& path() const override { return weights_.path(); }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override;

 private:
  WeightsSource weights_;
  std::vector<TensorFacts> facts_;
  std::vector<const WeightsSource::Tensor*> mapped_;  // in the order of facts_
};

}  // namespace echelon
