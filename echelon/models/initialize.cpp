#include "echelon/models/initialize.h"

#include "echelon/error.h"
#include "echelon/layers/sharded_module.h"

namespace echelon {

void initialize(
    torch::nn::Module& module, std::string_view prefix,
    const std::vector<ParameterInfo>& list, uint64_t seed) {
  auto tensors = module.named_parameters();
  tensors.update(module.named_buffers());
  if (tensors.size() != list.size()) {
    throw Error(
        "the model has " + std::to_string(tensors.size()) + " tensors \"" +
        std::string(prefix) + "…\", but its parameter list " +
        std::to_string(list.size()));
  }
  const auto shards = shards_of(module);
  for (const auto& info : list) {
    const bool named = info.name.starts_with(prefix);
    const auto name = named ? info.name.substr(prefix.size()) : "";
    const auto* tensor = named ? tensors.find(name) : nullptr;
    const auto found = shards.find(name);
    const bool cut = found != shards.end();
    const auto whole = cut ? at::IntArrayRef(found->second.shard.shape)
                       : tensor != nullptr ? tensor->sizes()
                                           : at::IntArrayRef();
    if (tensor == nullptr || whole != at::IntArrayRef(info.shape)) {
      throw Error(
          "the model and its parameter list differ at \"" + info.name + "\"");
    }
    if (cut) {
      fill_initial(*tensor, seed, info.name, found->second.shard, info.initial);
    } else {
      fill_initial(*tensor, seed, info.name, 0, info.initial);
    }
  }
}

}  // namespace echelon
