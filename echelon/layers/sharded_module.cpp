#include "echelon/layers/sharded_module.h"

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <utility>

#include "echelon/error.h"
#include "echelon/layers/parameter_init.h"

namespace echelon {
namespace {

std::string text(at::IntArrayRef sizes) {
  std::string list;
  for (const int64_t size : sizes) {
    list += (list.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + list + "]";
}

void check_shape(
    const char* what, at::IntArrayRef actual, at::IntArrayRef expected) {
  if (actual == expected) return;
  throw Error(
      std::string(what) + " is " + text(actual) + ", but the shard says " +
      text(expected));
}

}  // namespace

torch::Tensor
ShardedModule::register_shard(const std::string& name, ParameterShard shard) {
  auto tensor =
      register_parameter(name, torch::empty(shard.shard.local_shape()));
  shards_.insert_or_assign(name, std::move(shard));
  return tensor;
}

torch::Tensor ShardedModule::register_buffer_shard(
    const std::string& name, ParameterShard shard) {
  auto tensor = register_buffer(name, torch::zeros(shard.shard.local_shape()));
  shards_.insert_or_assign(name, std::move(shard));
  return tensor;
}

std::map<std::string, ParameterShard> shards_of(const torch::nn::Module& root) {
  std::map<std::string, ParameterShard> all;
  const auto take = [&](const std::string& name,
                        const torch::nn::Module& module) {
    const auto* sharded = dynamic_cast<const HasShards*>(&module);
    if (sharded == nullptr) return;
    for (const auto& [own, shard] : sharded->own_shards()) {
      all.emplace(name.empty() ? own : name + "." + own, shard);
    }
  };
  take("", root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    take(item.key(), *item.value());
  }
  return all;
}

void initialize_shards(
    torch::nn::Module& module, const std::string& prefix, uint64_t seed) {
  auto tensors = module.named_parameters();
  tensors.update(module.named_buffers());
  for (const auto& [name, shard] : shards_of(module)) {
    fill_initial(
        tensors[name], seed, prefix + name, shard.shard, shard.initial);
  }
}

torch::Tensor slice_of(const torch::Tensor& whole, const Shard& shard) {
  check_shape("the whole", whole.sizes(), shard.shape);
  if (shard.shape.empty()) return whole;
  std::vector<torch::Tensor> parts;
  for (const auto& piece : shard.pieces) {
    parts.push_back(whole.narrow(shard.dim, piece.begin, piece.size()));
  }
  if (parts.empty()) return whole.narrow(shard.dim, 0, 0);
  return parts.size() == 1 ? parts[0] : torch::cat(parts, shard.dim);
}

void copy_to_whole(
    torch::Tensor whole, const torch::Tensor& local, const Shard& shard) {
  check_shape("the whole", whole.sizes(), shard.shape);
  check_shape("the part", local.sizes(), shard.local_shape());
  const torch::NoGradGuard no_grad;
  if (shard.shape.empty()) {
    whole.copy_(local);
    return;
  }
  int64_t at = 0;
  for (const auto& piece : shard.pieces) {
    whole.narrow(shard.dim, piece.begin, piece.size())
        .copy_(local.narrow(shard.dim, at, piece.size()));
    at += piece.size();
  }
}

std::vector<torch::Tensor>
owned_parts(const torch::Tensor& local, const Shard& shard) {
  check_shape("the part", local.sizes(), shard.local_shape());
  if (shard.owned == shard.pieces) return {local};
  std::vector<torch::Tensor> parts;
  if (shard.shape.empty()) {
    if (!shard.owned.empty()) parts.push_back(local);
    return parts;
  }
  for (const auto& owned : shard.owned) {
    int64_t at = 0;
    for (const auto& piece : shard.pieces) {
      if (owned.begin >= piece.begin && owned.end <= piece.end) {
        parts.push_back(local.narrow(
            shard.dim, at + owned.begin - piece.begin, owned.size()));
        break;
      }
      at += piece.size();
    }
  }
  return parts;
}

}  // namespace echelon
