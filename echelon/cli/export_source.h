// What `export` writes: the weights of a run, and what their model is.
#pragma once

#include <memory>
#include <string>

#include "echelon/checkpoint/tensor_stream.h"
#include "echelon/train/job.h"

namespace echelon::cli {

struct ExportSource {
  std::string name;  // "runs/first/checkpoints/last.safetensors"
  std::unique_ptr<TensorSource> tensors;
  Job job;  // that they were trained by
};

/// Opens what `place` leads to: a run's folder, which has
/// checkpoints/last.safetensors. Throws ConfigError or DataError, saying what it is
/// instead, and as load_job and WeightsSource.
ExportSource open_export_source(const std::string& place);

}  // namespace echelon::cli
