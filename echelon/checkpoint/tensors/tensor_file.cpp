#include "echelon/checkpoint/tensors/tensor_file.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>

#include "echelon/error.h"

namespace echelon {
namespace {

using safetensors::File;
using safetensors::TensorInfo;

constexpr std::array<std::pair<std::string_view, torch::Dtype>, 19> kDtypes = {{
    {"F32", torch::kFloat32},
    {"F64", torch::kFloat64},
    {"F16", torch::kFloat16},
    {"BF16", torch::kBFloat16},
    {"I64", torch::kInt64},
    {"I32", torch::kInt32},
    {"I16", torch::kInt16},
    {"I8", torch::kInt8},
    {"U8", torch::kUInt8},
    {"U16", torch::kUInt16},
    {"U32", torch::kUInt32},
    {"U64", torch::kUInt64},
    {"BOOL", torch::kBool},
    {"C64", torch::kComplexFloat},
    {"F8_E4M3", torch::kFloat8_e4m3fn},
    {"F8_E5M2", torch::kFloat8_e5m2},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", torch::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", torch::kFloat8_e5m2fnuz},
}};

}  // namespace

torch::Dtype dtype_from_safetensors(const std::string& dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (name == dtype) return type;
  }
  throw CheckpointError("no tensor type for the safetensors dtype " + dtype);
}

std::string dtype_to_safetensors(torch::Dtype dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return std::string(name);
  }
  throw ConfigError(
      std::string("safetensors has no dtype for ") + c10::toString(dtype));
}

torch::Tensor
load_tensor(const std::shared_ptr<const File>& file, const TensorInfo& info) {
  file->verify(info);
  const auto bytes = file->bytes(info);
  const auto options =
      torch::TensorOptions().dtype(dtype_from_safetensors(info.dtype));
  if (info.dtype == "BOOL" &&
      std::any_of(bytes.begin(), bytes.end(), [](std::byte value) {
        return value > std::byte{1};
      })) {
    throw CheckpointError(
        file->path() + ": tensor \"" + info.name +
        "\" is BOOL and holds a byte that is neither 0 nor 1");
  }
  if (bytes.empty()) return torch::empty(info.shape, options);
  const uint64_t width = safetensors::dtype_bytes(info.dtype);
  if (reinterpret_cast<uintptr_t>(bytes.data()) % width != 0) {
    const auto copy = torch::empty(info.shape, options);
    std::copy(
        bytes.begin(), bytes.end(), static_cast<std::byte*>(copy.data_ptr()));
    return copy;
  }
  return torch::from_blob(
      const_cast<std::byte*>(bytes.data()), info.shape, [file](void*) {},
      options);
}

std::vector<torch::Tensor>
load_tensors(const std::string& path, const std::vector<std::string>& names) {
  const auto file = std::make_shared<const File>(path);
  std::vector<torch::Tensor> tensors;
  for (const auto& name : names) {
    tensors.push_back(load_tensor(file, file->at(name)));
  }
  return tensors;
}

std::vector<NamedTensor> load_tensors(const std::string& path) {
  const auto file = std::make_shared<const File>(path);
  std::vector<NamedTensor> tensors;
  for (const auto& info : file->tensors()) {
    tensors.emplace_back(info.name, load_tensor(file, info));
  }
  return tensors;
}

void save_tensors(
    const std::string& path, const std::vector<NamedTensor>& tensors,
    const safetensors::Metadata& metadata) {
  std::vector<torch::Tensor> on_host;  // keeps the bytes alive
  std::vector<safetensors::TensorBytes> list;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || tensor.layout() != torch::kStrided) {
      throw ConfigError(
          path + ": tensor \"" + name +
          "\" is undefined or sparse; only dense tensors can be written");
    }
    on_host.push_back(
        tensor.detach().to(torch::kCPU).resolve_conj().contiguous());
    const auto& host = on_host.back();
    list.push_back(
        {name,
         dtype_to_safetensors(host.scalar_type()),
         host.sizes().vec(),
         {static_cast<const std::byte*>(host.const_data_ptr()),
          host.nbytes()}});
  }
  safetensors::write(path, list, metadata);
}

}  // namespace echelon
