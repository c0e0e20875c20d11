#include "echelon/models/weights_source.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/checkpoint/foreign.h"
#include "echelon/error.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// Files by the names of their tensors.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw CheckpointError(path + ": cannot be read");
  const auto fail = [&](const std::string& what) {
    throw CheckpointError(
        path + ": " + what +
        "; an index is {\"weight_map\": {\"tensor\": \"file\", …}, …}");
  };
  const json index = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (index.is_discarded()) fail("is not JSON, or cut off");
  const bool has_map = index.is_object() && index.contains("weight_map") &&
                       index["weight_map"].is_object();
  if (!has_map) fail("has no weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string()) fail("\"" + name + "\" has no file");
    const auto file_name = file.get<std::string>();
    // Only of this folder.
    if (fs::path(file_name).filename() != file_name) {
      fail("\"" + name + "\" lies in \"" + file_name + "\", outside");
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

std::string
name_in_model(const std::string& name, const std::string& prefix) {
  if (prefix.empty()) return name;
  if (is_stored_constant(name)) return "";
  const bool full = name.starts_with(prefix) || name.starts_with("lm_head.");
  return full ? name : prefix + name;
}

WeightsSource::WeightsSource(const std::string& path, std::string prefix)
    : path_(path), prefix_(std::move(prefix)) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    const auto foreign = foreign_checkpoint(path);
    if (!foreign.empty()) throw CheckpointError(foreign);
    add_file(path);
    return;
  }
  const fs::path folder(path);
  if (fs::exists(folder / kIndex, error)) {
    add_index(path);
  } else if (fs::exists(folder / kSingle, error)) {
    add_file((folder / kSingle).string());
  } else {
    const auto foreign = foreign_checkpoint(path);
    throw CheckpointError(
        path + ": a folder without " + kSingle + " and " + kIndex + "; " +
        (foreign.empty()
             ? "name a .safetensors file or a Hugging Face folder"
             : foreign));
  }
}

const WeightsSource::Tensor*
WeightsSource::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void WeightsSource::add_file(const std::string& path) {
  const auto file = std::make_shared<const safetensors::File>(path);
  for (const auto& info : file->tensors()) add(file, info);
}

void WeightsSource::add_index(const std::string& path) {
  const fs::path folder(path);
  std::map<std::string, std::shared_ptr<const safetensors::File>> files;
  for (const auto& [name, file] : read_weight_map((folder / kIndex).string())) {
    auto& shard = files[file];
    if (!shard) {
      std::error_code error;
      const auto shard_path = folder / file;
      if (!fs::exists(shard_path, error)) {
        throw CheckpointError(
            shard_path.string() + ": is missing, but " + kIndex +
            " says that it has \"" + name +
            "\"; copy or download all files of the folder");
      }
      shard = std::make_shared<const safetensors::File>(shard_path.string());
    }
    const auto* info = shard->find(name);
    if (info == nullptr) {
      throw CheckpointError(
          (folder / file).string() + ": has no \"" + name + "\", but " +
          kIndex + " says so; the two are of different models");
    }
    add(shard, *info);
  }
}

void WeightsSource::add(
    std::shared_ptr<const safetensors::File> file,
    const safetensors::TensorInfo& info) {
  const std::string name = name_in_model(info.name, prefix_);
  if (name.empty()) return;
  if (!tensors_.emplace(name, Tensor{std::move(file), &info}).second) {
    throw CheckpointError(
        path_ + ": has \"" + name + "\" twice, with \"" + prefix_ +
        "\" in front and without; leave one of them out");
  }
}

}  // namespace echelon
