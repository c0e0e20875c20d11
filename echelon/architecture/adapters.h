// Trained adapters for other programs: added to the matrices of their model, or
// under the names of Hugging Face's peft. Free of LibTorch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "echelon/architecture/trained_parameters.h"
#include "echelon/checkpoint/format/tensor_stream.h"

namespace echelon {

/// A language model's tensors with its adapters added: W + scale * B A, where W
/// is [out, in], or its transpose. The sums are computed in float64 and have
/// the adapters' dtype; other tensors are the base's.
class AdaptedTensors : public TensorSource {
 public:
  /// `base` and `adapters` may be one source. Throws DataError for an adapter
  /// whose matrix is missing, or of another shape.
  ///
  ///   in_by_out  matrices are [in, out], as those of GPT-2
  AdaptedTensors(
      std::shared_ptr<TensorSource> base,
      std::shared_ptr<TensorSource> adapters, double scale, bool in_by_out);

  const std::string& path() const override { return base_->path(); }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override;

 private:
  struct Adapter {
    size_t a = 0, b = 0;  // in adapters_
    int64_t rank = 0;
  };

  void add_product(const Piece& piece);

  std::shared_ptr<TensorSource> base_;
  std::shared_ptr<TensorSource> adapters_;
  double scale_;
  bool in_by_out_;
  std::vector<TensorFacts> facts_;
  std::vector<size_t> numbers_;                    // in base_, as facts_
  std::vector<std::unique_ptr<Adapter>> adapted_;  // as facts_; null: none
};

/// The adapters of `source` under peft's names:
/// "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight".
///
///   dtype  as in hugging_face::owned_tensors
std::vector<TensorToWrite>
peft_tensors(const TensorSource& source, const std::string& dtype = "");

/// peft's adapter_config.json.
///
///   base       the model that the adapters belong to, as peft finds it
///   list       the model's parameters
///   in_by_out  matrices are [in, out]
std::string peft_config(
    const LoraOptions& lora, const std::string& base,
    const std::vector<ParameterInfo>& list, bool in_by_out);

}  // namespace echelon
