#include "echelon/layers/sharded_module.h"

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <utility>

#include "echelon/error.h"
#include "echelon/layers/parameter_init.h"
#include "echelon/text/check.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

void check_shape(
    const char* what, at::IntArrayRef actual, at::IntArrayRef expected) {
  ECHELON_CHECK(
      actual == expected, "{} is {}, but the shard says {}", what,
      c10::str(actual), c10::str(expected));
}

torch::OrderedDict<std::string, torch::Tensor>
parameters_and_buffers(const torch::nn::Module& module) {
  auto tensors = module.named_parameters();
  tensors.update(module.named_buffers());
  return tensors;
}

}  // namespace

torch::Tensor
ShardedModule::register_shard(const std::string& name, ParameterShard shard) {
  auto tensor =
      register_parameter(name, torch::empty(shard.shard.local_shape()));
  shards_.insert_or_assign(name, std::move(shard));
  return tensor;
}

std::map<std::string, ParameterShard> shards_of(const torch::nn::Module& root) {
  std::map<std::string, ParameterShard> all;
  const auto add = [&](const std::string& name,
                       const torch::nn::Module& module) {
    const auto* sharded = dynamic_cast<const HasShards*>(&module);
    if (sharded == nullptr) return;
    for (const auto& [own, shard] : sharded->own_shards()) {
      all.emplace(name.empty() ? own : name + "." + own, shard);
    }
  };
  add("", root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    add(item.key(), *item.value());
  }
  return all;
}

void initialize_shards(
    torch::nn::Module& module, const std::string& prefix, uint64_t seed) {
  const auto tensors = parameters_and_buffers(module);
  for (const auto& [name, shard] : shards_of(module)) {
    fill_initial(
        tensors[name], seed, prefix + name, shard.shard, shard.initial);
  }
}

void initialize(
    torch::nn::Module& module, std::string_view prefix,
    const std::vector<ParameterInfo>& list, uint64_t seed) {
  const auto tensors = parameters_and_buffers(module);
  if (tensors.size() != list.size()) {
    throw Error(format(
        "the model has {} tensors \"{}…\", but its parameter list {}",
        tensors.size(), prefix, list.size()));
  }
  const auto shards = shards_of(module);
  for (const auto& info : list) {
    const bool named = info.name.starts_with(prefix);
    const auto name = named ? info.name.substr(prefix.size()) : "";
    const auto* tensor = named ? tensors.find(name) : nullptr;
    const auto found = shards.find(name);
    const bool sharded = found != shards.end();
    const bool equal = tensor != nullptr &&
                       at::IntArrayRef(info.shape) ==
                           (sharded ? at::IntArrayRef(found->second.shard.shape)
                                    : tensor->sizes());
    if (!equal) {
      throw Error(format(
          "the model and its parameter list differ at \"{}\"", info.name));
    }
    if (sharded) {
      fill_initial(*tensor, seed, info.name, found->second.shard, info.initial);
    } else {
      fill_initial(*tensor, seed, info.name, 0, info.initial);
    }
  }
}

torch::Tensor slice_of(const torch::Tensor& full, const Shard& shard) {
  check_shape("the full tensor", full.sizes(), shard.shape);
  if (shard.shape.empty()) return full;
  std::vector<torch::Tensor> parts;
  for (const auto& piece : shard.pieces) {
    parts.push_back(full.narrow(shard.dim, piece.begin, piece.size()));
  }
  if (parts.empty()) return full.narrow(shard.dim, 0, 0);
  return parts.size() == 1 ? parts[0] : torch::cat(parts, shard.dim);
}

void copy_into_full(
    torch::Tensor full, const torch::Tensor& local, const Shard& shard) {
  check_shape("the full tensor", full.sizes(), shard.shape);
  check_shape("the local tensor", local.sizes(), shard.local_shape());
  const torch::NoGradGuard no_grad;
  if (shard.shape.empty()) {
    full.copy_(local);
    return;
  }
  int64_t at = 0;
  for (const auto& piece : shard.pieces) {
    full.narrow(shard.dim, piece.begin, piece.size())
        .copy_(local.narrow(shard.dim, at, piece.size()));
    at += piece.size();
  }
}

}  // namespace echelon
