#include "echelon/train/gather_state.h"

#include <map>

#include "echelon/error.h"
#include "echelon/parallel/data/coalesced.h"

namespace echelon {
namespace {

torch::Dtype dtype_in(const ParameterInfo& info) {
  return info.dtype == "int64" ? torch::kInt64 : dtype_of(info.dtype);
}

// The first rank of the pipeline that has each name.
std::map<std::string, int>
owners(const NamedTensors& own, const Group& group, torch::Device device) {
  std::vector<std::string> names;
  for (const auto& [name, _] : own) names.push_back(name);
  const auto all = gather_lines(names, group, device, "who holds what");
  std::map<std::string, int> owners;
  for (int rank = 0; rank < group.size(); ++rank) {
    for (const auto& name : all[static_cast<size_t>(rank)]) {
      owners.emplace(name, rank);
    }
  }
  return owners;
}

}  // namespace

std::vector<NamedTensor> gather_state(
    const ParallelModel& model,
    const std::vector<ParameterInfo>& list,
    const MeshGroups& groups,
    torch::Device device) {
  const torch::NoGradGuard no_grad;
  const Group& pipeline = groups.along(Axis::pp);
  if (groups.data_index() != 0) return {};
  const NamedTensors own = model.state();
  const auto owner = owners(own, pipeline, device);
  const std::map<std::string, torch::Tensor> here(own.begin(), own.end());
  std::vector<NamedTensor> state;
  for (const auto& info : list) {
    const auto found = owner.find(info.name);
    if (found == owner.end()) {
      throw Error("no rank of the pipeline holds \"" + info.name + "\"");
    }
    const int source = found->second;
    const Call call{.label = info.name};
    if (source == 0) {
      if (pipeline.rank() == 0) {
        state.emplace_back(info.name, here.at(info.name).detach());
      }
    } else if (pipeline.rank() == 0) {
      auto tensor = torch::empty(
          info.shape, torch::dtype(dtype_in(info)).device(device));
      pipeline.recv(tensor, source, 0, call).wait();
      state.emplace_back(info.name, tensor);
    } else if (pipeline.rank() == source) {
      pipeline.send(here.at(info.name).detach().contiguous(), 0, 0, call)
          .wait();
    }
  }
  return state;
}

}  // namespace echelon
