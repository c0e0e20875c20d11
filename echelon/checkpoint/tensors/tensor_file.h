// LibTorch tensors in safetensors files.
#pragma once

#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "echelon/checkpoint/format/safetensors.h"

namespace echelon {

using NamedTensor = std::pair<std::string, torch::Tensor>;

/// LibTorch's dtype for "F32", and back. Throws CheckpointError for a name, or
/// ConfigError for a dtype, that the other side does not have.
torch::Dtype dtype_from_safetensors(const std::string& dtype);
std::string dtype_to_safetensors(torch::Dtype dtype);

/// The tensors of `names`, in that order; without names all, in file order.
/// They share the mapped file, which stays mapped while one of them lives;
/// writing to one does not change the file. One that is not aligned to its
/// dtype is copied. Throws CheckpointError as safetensors::File and verify(),
/// for a missing name, and for a BOOL that is neither 0 nor 1.
std::vector<torch::Tensor>
load_tensors(const std::string& path, const std::vector<std::string>& names);
std::vector<NamedTensor> load_tensors(const std::string& path);

/// The same for one of `file->tensors()`.
torch::Tensor load_tensor(
    const std::shared_ptr<const safetensors::File>& file,
    const safetensors::TensorInfo& info);

/// Writes them as safetensors::write() does. Tensors on a device are copied to
/// the host, strided ones made contiguous. Throws ConfigError for an undefined
/// or sparse one.
void save_tensors(
    const std::string& path, const std::vector<NamedTensor>& tensors,
    const safetensors::Metadata& metadata = {});

}  // namespace echelon
