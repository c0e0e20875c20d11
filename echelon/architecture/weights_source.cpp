#include "echelon/architecture/weights_source.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/foreign.h"
#include "echelon/checkpoint/remote/object_checkpoints.h"
#include "echelon/checkpoint/weights/checkpoint_tensors.h"
#include "echelon/error.h"
#include "echelon/storage/local_copy.h"
#include "echelon/storage/settings.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The bytes of a mapped file that are in memory at a time.
constexpr size_t kMappedBytes = 8 << 20;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// The file of each tensor.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw CheckpointError(path + ": cannot be read");
  const auto fail = [&](const std::string& what) {
    throw CheckpointError(format(
        "{}: {}; an index is {{\"weight_map\": {{\"tensor\": \"file\", …}}, "
        "…}}",
        path, what));
  };
  const json index = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (index.is_discarded()) fail("is not JSON, or cut off");
  const bool has_map = index.is_object() && index.contains("weight_map") &&
                       index["weight_map"].is_object();
  if (!has_map) fail("has no weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string()) fail(format("\"{}\" has no file", name));
    const auto file_name = file.get<std::string>();
    // Files outside of this folder are refused.
    if (fs::path(file_name).filename() != file_name) {
      fail(format("\"{}\" lies in \"{}\", outside", name, file_name));
    }
    files[name] = file_name;
  }
  return files;
}

bool is_stored_constant(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

}  // namespace

std::string base_prefix(const std::vector<std::string>& names) {
  if (names.empty() || !names.back().starts_with("lm_head")) return "";
  return names.front().substr(0, names.front().find('.') + 1);
}

std::string name_in_model(const std::string& name, const std::string& prefix) {
  if (prefix.empty()) return name;
  if (is_stored_constant(name)) return "";
  const bool full = name.starts_with(prefix) || name.starts_with("lm_head.");
  return full ? name : prefix + name;
}

WeightsSource::WeightsSource(const std::string& path, std::string prefix)
    : path_(path), prefix_(std::move(prefix)) {
  std::error_code error;
  if (storage::is_object_url(path) ? path.ends_with(".safetensors")
                                   : !fs::is_directory(path, error)) {
    const auto foreign = foreign_checkpoint(path);
    if (!foreign.empty()) throw CheckpointError(foreign);
    add_file(path);
    return;
  }
  const fs::path folder(path);
  if (storage::exists_there(folder / kIndex)) {
    add_index(path);
  } else if (storage::exists_there(folder / kSingle)) {
    add_file((folder / kSingle).string());
  } else if (const auto last = last_weights(path); !last.empty()) {
    add_file(last);
  } else {
    add_checkpoint(path);
  }
}

const WeightsSource::Tensor*
WeightsSource::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::string last_weights(const std::string& run) {
  const fs::path folder = fs::path(run) / "checkpoints";
  const auto last = folder / "last.safetensors";
  std::error_code error;
  const bool only = fs::exists(last, error) && list_checkpoints(folder).empty();
  return only ? last.string() : "";
}

void WeightsSource::Tensor::read(
    const IndexRange& elements, std::byte* to) const {
  if (checkpoint) return checkpoint->read({{number, elements, to}});
  file->verify(*info);
  const auto width = safetensors::dtype_bytes(info->dtype);
  const auto bytes = file->bytes(*info).subspan(
      static_cast<size_t>(elements.begin) * width,
      static_cast<size_t>(elements.size()) * width);
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
}

void WeightsSource::add_file(const std::string& path) {
  const auto file =
      std::make_shared<const safetensors::File>(storage::local_copy(path));
  for (const auto& info : file->tensors()) add(file, info);
}

void WeightsSource::add_index(const std::string& path) {
  const fs::path folder(path);
  std::map<std::string, std::shared_ptr<const safetensors::File>> files;
  for (const auto& [name, file] :
       read_weight_map(storage::local_copy(folder / kIndex))) {
    auto& shard = files[file];
    if (!shard) {
      const auto shard_path = folder / file;
      if (!storage::exists_there(shard_path)) {
        throw CheckpointError(format(
            "{}: is missing, but {} says that it has \"{}\"; copy or download "
            "all files of the folder",
            shard_path.string(), kIndex, name));
      }
      shard = std::make_shared<const safetensors::File>(
          storage::local_copy(shard_path));
    }
    const auto* info = shard->find(name);
    if (info == nullptr) {
      throw CheckpointError(format(
          "{}: has no \"{}\", but {} says so; the two are of different models",
          (folder / file).string(), name, kIndex));
    }
    add(shard, *info);
  }
}

void WeightsSource::add(
    std::shared_ptr<const safetensors::File> file,
    const safetensors::TensorInfo& info) {
  Tensor tensor;
  tensor.facts = {info.name, info.dtype, info.shape};
  tensor.file = std::move(file);
  tensor.info = &info;
  add(std::move(tensor));
}

// Adds the newest checkpoint of a run. Its names are the model's own.
void WeightsSource::add_checkpoint(const std::string& path) {
  std::vector<CheckpointPlace> places;
  try {
    places = find_checkpoints(local_checkpoint(path));
  } catch (const CheckpointError& error) {
    throw CheckpointError(format(
        "{}; weights are a .safetensors file, a Hugging Face folder with {} or "
        "{}, a run or a checkpoint",
        error.what(), kSingle, kIndex));
  }
  std::string way_out;
  if (places.size() > 1) {
    way_out = "; the one before it is " + places[1].path.string();
  }
  const auto checkpoint = std::make_shared<CheckpointTensors>(
      std::make_unique<CheckpointReader>(places[0].path.string()), way_out);
  for (size_t i = 0; i < checkpoint->tensors().size(); ++i) {
    Tensor tensor;
    tensor.facts = checkpoint->tensors()[i];
    tensor.checkpoint = checkpoint;
    tensor.number = i;
    add(std::move(tensor));
  }
}

// Adds the tensor under the model's name for it.
void WeightsSource::add(Tensor tensor) {
  const std::string name = name_in_model(tensor.facts.name, prefix_);
  if (name.empty()) return;
  tensor.facts.name = name;
  if (!tensors_.emplace(name, std::move(tensor)).second) {
    throw CheckpointError(format(
        "{}: has \"{}\" twice, with \"{}\" in front and without; leave one of "
        "them out",
        path_, name, prefix_));
  }
}

MappedTensors::MappedTensors(WeightsSource weights)
    : weights_(std::move(weights)) {
  for (const auto& [name, tensor] : weights_.tensors()) {
    facts_.push_back(tensor.facts);
    mapped_.push_back(&tensor);
  }
}

void MappedTensors::read(const std::vector<Piece>& pieces) {
  for (const auto& piece : pieces) {
    const auto& tensor = *mapped_.at(piece.tensor);
    if (!tensor.file) {
      tensor.read(piece.elements, piece.to);
      continue;
    }
    tensor.file->verify(*tensor.info);
    const auto width = safetensors::dtype_bytes(tensor.info->dtype);
    const auto bytes =
        tensor.file->bytes(*tensor.info)
            .subspan(
                static_cast<size_t>(piece.elements.begin) * width,
                static_cast<size_t>(piece.elements.size()) * width);
    for (size_t at = 0; at < bytes.size(); at += kMappedBytes) {
      const auto some =
          bytes.subspan(at, std::min(kMappedBytes, bytes.size() - at));
      std::memcpy(piece.to + at, some.data(), some.size());
      tensor.file->forget(some);
    }
  }
}

}  // namespace echelon
