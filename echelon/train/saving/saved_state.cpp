// Restoring has two parts. check_state() compares the manifest with the model
// without reading values. load_state() lists what this rank needs
// (saved_shards.h), reads it by few calls through Filling, and, since a failure
// on one rank must be one on all, exchanges the errors before training goes on.
#include "echelon/train/saving/saved_state.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/error.h"
#include "echelon/parallel/data/coalesced.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

// Bytes that are staged at a time, to be converted or copied to a device.
constexpr int64_t kStagedBytes = 256 << 20;

// What a manifest must say about a tensor.
struct Expected {
  SavedKind kind;
  std::vector<int64_t> shape;
  bool floating;
};

bool is_floating(const std::string& dtype) {
  return dtype.starts_with("F") || dtype.starts_with("BF");
}

std::map<std::string, Expected>
expected_of(const ModelSource& source, const Optimizer& optimizer) {
  std::map<std::string, Expected> all;
  for (const auto& info : source.parameters) {
    if (source.unsaved.contains(info.name)) continue;
    const bool trained = info.kind == ParameterInfo::Kind::parameter;
    all[info.name] = {
        trained ? SavedKind::parameter : SavedKind::buffer, info.shape,
        info.dtype.starts_with("float")};
    // A parameter without elements has no state either.
    if (!trained || source.frozen.contains(info.name) ||
        whole_box(info.shape).numel() == 0) {
      continue;
    }
    for (const auto& kind : optimizer.state_kinds()) {
      all[info.name + "/" + kind.name] = {
          SavedKind::optimizer,
          kind.is_number ? std::vector<int64_t>{} : info.shape, true};
    }
  }
  return all;
}

// Says what is different; empty when nothing is.
std::string difference(const SavedTensor& saved, const Expected& here) {
  if (saved.kind != here.kind) {
    return "is a tensor of kind " + to_string(saved.kind) + ", here " +
           to_string(here.kind);
  }
  if (saved.shape != here.shape) {
    return "has shape " + safetensors::shape_string(saved.shape) + ", here " +
           safetensors::shape_string(here.shape);
  }
  if (is_floating(saved.dtype) != here.floating) {
    return "has dtype " + saved.dtype + ", here it is " +
           (here.floating ? "floating-point" : "of whole numbers");
  }
  return "";
}

}  // namespace

void check_state(
    const CheckpointManifest& manifest, const ModelSource& source,
    const Optimizer& optimizer) {
  const auto expected = expected_of(source, optimizer);
  std::map<std::string, const SavedTensor*> saved;
  for (const auto& tensor : manifest.tensors) saved[tensor.name] = &tensor;
  std::string problems;
  const auto add = [&](const std::string& name, const std::string& what) {
    problems += "\n  " + name + ": " + what;
  };
  for (const auto& [name, here] : expected) {
    const auto found = saved.find(name);
    if (found == saved.end()) {
      if (whole_box(here.shape).numel() > 0) add(name, "missing");
    } else if (const auto what = difference(*found->second, here);
               !what.empty()) {
      add(name, what);
    }
  }
  for (const auto& [name, tensor] : saved) {
    const bool of_model = tensor->kind == SavedKind::parameter ||
                          tensor->kind == SavedKind::buffer;
    if (of_model && !expected.contains(name) &&
        !source.unsaved.contains(name)) {
      add(name, "unexpected");
    }
  }
  if (problems.empty()) return;
  throw CheckpointError(format(
      "the checkpoint of step {} is not of this model and optimizer; resume "
      "with the [model] and [optimizer] that it was saved with:{}",
      manifest.step, problems));
}

std::string detail::first_failure(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    return errors.size() == 1 ? errors[rank]
                              : format("rank {}: {}", rank, errors[rank]);
  }
  return {};
}

// -------------------------------------------------------------------- loading

namespace {

// Whether the state is one number, whose tensor several parameters may share.
bool is_number(const StateShard& part) {
  return part.kind == SavedKind::optimizer && part.tensor.dim() == 0;
}

// Fills shards by as few calls of the reader as host memory allows. Values of
// another dtype or device are staged first.
class Filling {
 public:
  explicit Filling(CheckpointReader& reader) : reader_(reader) {
    for (const auto& tensor : reader.manifest().tensors) {
      saved_[tensor.name] = &tensor;
    }
  }

  void add(const StateShard& part) {
    const SavedTensor& saved = *saved_.at(part.name);
    if (is_number(part)) {
      numbers_.push_back(
          {part.name, part.tensor, torch::zeros({}, torch::kFloat64)});
      return stage(saved, part.boxes.front(), numbers_.back().value);
    }
    const Tensor to = part.tensor.contiguous();
    if (!to.is_same(part.tensor)) strided_.emplace_back(part.tensor, to);
    const auto dtype = dtype_from_safetensors(saved.dtype);
    for (const auto& placed : part.boxes) {
      if (to.is_cpu() && to.scalar_type() == dtype) {
        read_into(saved, placed, to);
      } else {
        stage_pieces(saved, placed, to);
      }
    }
  }

  /// Returns lines about what could not be restored as it was saved.
  std::vector<std::string> finish() {
    flush();
    for (const auto& [live, filled] : strided_) live.copy_(filled);
    return set_numbers();
  }

 private:
  struct Staged {
    Tensor memory;
    Tensor to;
  };
  struct Number {
    std::string name;
    Tensor tensor;
    Tensor value;
  };

  void read_into(
      const SavedTensor& saved, const PlacedBox& placed, const Tensor& to) {
    const int64_t begin =
        placed.begin * static_cast<int64_t>(to.element_size());
    reads_.push_back(
        {.tensor = &saved,
         .box = placed.box,
         .to = static_cast<std::byte*>(to.mutable_data_ptr()) + begin,
         .strides = placed.strides});
  }

  void stage_pieces(
      const SavedTensor& saved, const PlacedBox& placed, const Tensor& to) {
    const auto width = static_cast<int64_t>(
        c10::elementSize(dtype_from_safetensors(saved.dtype)));
    const int64_t numel = placed.box.numel();
    const int64_t most = kStagedBytes / width;
    for (int64_t at = 0; at < numel; at += most) {
      for (const auto& piece :
           elements_of({placed}, {at, std::min(at + most, numel)})) {
        stage(
            saved, piece,
            to.as_strided(
                piece.box.sizes, piece.strides,
                to.storage_offset() + piece.begin));
      }
    }
  }

  // Reads into host memory first, to convert values or copy them to a device.
  void
  stage(const SavedTensor& saved, const PlacedBox& placed, const Tensor& to) {
    const Tensor memory = torch::empty(
        placed.box.sizes, torch::dtype(dtype_from_safetensors(saved.dtype))
                              .pinned_memory(!to.is_cpu()));
    reads_.push_back(
        {.tensor = &saved,
         .box = placed.box,
         .to = static_cast<std::byte*>(memory.mutable_data_ptr())});
    staged_.push_back({memory, to});
    staged_bytes_ += static_cast<int64_t>(memory.nbytes());
    if (staged_bytes_ >= kStagedBytes) flush();
  }

  void flush() {
    if (!reads_.empty()) reader_.read(reads_);
    for (const auto& one : staged_) one.to.copy_(one.memory);
    reads_.clear();
    staged_.clear();
    staged_bytes_ = 0;
  }

  // Sets the numbers that parameters of one flat shard share, such as Adam's
  // steps, to the largest that was saved, and says so where they differed.
  std::vector<std::string> set_numbers() {
    std::map<const void*, std::vector<const Number*>> by_tensor;
    for (const auto& number : numbers_) {
      by_tensor[number.tensor.unsafeGetTensorImpl()].push_back(&number);
    }
    std::vector<std::string> lines;
    for (const auto& [_, same] : by_tensor) {
      const auto value = [](const Number* one) {
        return one->value.item<double>();
      };
      const auto [least, most] = std::minmax_element(
          same.begin(), same.end(),
          [&](const auto* a, const auto* b) { return value(a) < value(b); });
      Tensor(same.front()->tensor).fill_(value(*most));
      if (value(*least) == value(*most)) continue;
      std::ostringstream line;
      line << "\"" << (*least)->name << "\" was " << value(*least) << " and \""
           << (*most)->name << "\" " << value(*most)
           << "; here they share one flat shard, which continues with the "
              "larger";
      lines.push_back(line.str());
    }
    return lines;
  }

  CheckpointReader& reader_;
  std::unordered_map<std::string, const SavedTensor*> saved_;
  std::vector<BoxRead> reads_;
  std::vector<Staged> staged_;
  int64_t staged_bytes_ = 0;
  std::vector<Number> numbers_;
  std::vector<std::pair<Tensor, Tensor>> strided_;  // live, filled
};

// Random state fits the same number of ranks only: each drew its own numbers.
std::vector<std::string> load_random(
    CheckpointReader& reader, const World& world, const MeshGroups& groups) {
  const auto& manifest = reader.manifest();
  if (manifest.ranks != groups.mesh().size()) {
    return {format(
        "random state is that of {} rank{}, here {} {}: generators start from "
        "the seed",
        manifest.ranks, manifest.ranks == 1 ? "" : "s",
        groups.mesh().size() == 1 ? "is" : "are", groups.mesh().size())};
  }
  std::vector<std::string> lines;
  for (auto& [name, generator] : detail::random_sources(world, groups)) {
    const std::lock_guard lock(generator.mutex());
    const SavedTensor* saved = manifest.find(name);
    Tensor bytes = generator.get_state().clone();
    if (saved == nullptr || saved->shape != bytes.sizes().vec() ||
        saved->dtype != "U8") {
      lines.push_back(
          "\"" + name +
          "\" is not in the checkpoint, or of another kind of generator: it "
          "starts from the seed");
      continue;
    }
    reader.read(
        *saved, whole_box(saved->shape),
        static_cast<std::byte*>(bytes.mutable_data_ptr()));
    generator.set_state(bytes);
  }
  return lines;
}

// Lines are sent without line breaks.
std::string replaced(std::string text, char from, char to) {
  std::replace(text.begin(), text.end(), from, to);
  return text;
}

// The distinct lines of all ranks of the mesh, the lowest rank's first.
std::vector<std::string> gather_all(
    std::vector<std::string> lines, const MeshGroups& groups,
    torch::Device device) {
  for (auto& line : lines) line = replaced(line, '\n', '\r');
  const AxisOrder& order = groups.mesh().layout().order;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    const Group& group = groups.along(*axis);
    if (group.size() == 1) continue;
    std::vector<std::string> all;
    for (const auto& rank : gather_lines(lines, group, device, "loaded")) {
      for (const auto& line : rank) {
        if (std::find(all.begin(), all.end(), line) == all.end()) {
          all.push_back(line);
        }
      }
    }
    lines = std::move(all);
  }
  for (auto& line : lines) line = replaced(line, '\r', '\n');
  return lines;
}

}  // namespace

std::vector<std::string> load_state(
    TrainingState& state, CheckpointReader& reader, const ModelSource& source,
    const World& world, const MeshGroups& groups) {
  const torch::NoGradGuard no_grad;
  const std::string failed = "!";
  std::vector<std::string> lines;
  // Pending work of the last step must end on every rank before values change.
  state.model().before_load();
  world.group().barrier();
  try {
    check_state(reader.manifest(), source, state.optimizer());
    Filling filling(reader);
    for (const auto& part : shards_to_load(state, source)) filling.add(part);
    lines = filling.finish();
    for (auto& line : load_random(reader, world, groups)) {
      lines.push_back(std::move(line));
    }
  } catch (const CheckpointError& error) {
    lines = {failed + error.what()};
  }
  lines = gather_all(std::move(lines), groups, world.device());
  for (const auto& line : lines) {
    if (line.starts_with(failed)) throw CheckpointError(line.substr(1));
  }
  state.model().after_load();
  return lines;
}

}  // namespace echelon
