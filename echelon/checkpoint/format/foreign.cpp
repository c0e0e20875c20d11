#include "echelon/checkpoint/format/foreign.h"
#include "echelon/text/format.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

namespace echelon {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNoPickles =
    "; a pickle is a program that reading it runs, so Echelon reads none";

bool is_pickle(const fs::path& path) {
  const auto extension = path.extension();
  return extension == ".pt" || extension == ".pth" || extension == ".bin" ||
         extension == ".ckpt";
}

bool names_backend(const fs::path& metadata) {
  std::ifstream file(metadata, std::ios::binary);
  std::string text(1 << 16, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text.find("\"sharded_backend\"") != std::string::npos;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  fs::directory_iterator at(folder, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    entries.push_back(at->path());
  }
  std::sort(entries.begin(), entries.end());
  return entries;
}

std::string in_shell(const fs::path& path) {
  std::string quoted = "'";
  for (const char c : path.string()) {
    quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return quoted + "'";
}

std::string torch_to_safetensors(const std::string& file) {
  return "\n  python -c \"import torch, safetensors.torch as s; t = "
         "torch.load(" +
         file +
         ", weights_only=True); s.save_file(t.get('model', t), "
         "'model.safetensors')\"";
}

std::string megatron(const fs::path& path) {
  return format(
      "{} is a checkpoint of Megatron-LM: the numbers of its model (common.pt) "
      "and the places of its tensors (.metadata) are pickles{}. "
      "Megatron-Bridge turns it into a Hugging Face folder, which `echelon "
      "import` reads:\n  python examples/conversion/convert_checkpoints.py "
      "export --hf-model MODEL --megatron-path {} --hf-path hf-folder",
      path.string(), kNoPickles, in_shell(path));
}

std::string dcp(const fs::path& path) {
  return format(
      "{} is a folder of torch.distributed.checkpoint (DCP): the names and "
      "places of its tensors (.metadata) are a pickle, and its .distcp files "
      "are made of them{}. PyTorch's own tools turn it into a safetensors "
      "file, whose weights training begins with by [model] weights:\n  python "
      "-m torch.distributed.checkpoint.format_utils dcp_to_torch {} "
      "weights.pt{}\nor save it with DCP's HuggingFaceStorageWriter, whose "
      "files are safetensors ones",
      path.string(), kNoPickles, in_shell(path),
      torch_to_safetensors("'weights.pt'"));
}

std::string pickle(const fs::path& path) {
  return format(
      "{} is a pickle of torch.save{}. PyTorch turns it into a safetensors "
      "file, whose weights training begins with by [model] weights:{}",
      path.string(), kNoPickles,
      torch_to_safetensors("'" + path.string() + "'"));
}

}  // namespace

std::string foreign_checkpoint(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    const bool file = fs::is_regular_file(path, error);
    return file && is_pickle(path) ? pickle(path) : "";
  }
  const auto entries = entries_of(path);
  const auto any = [&](auto&& is) {
    return std::find_if(entries.begin(), entries.end(), is);
  };
  const bool from_megatron =
      any([](const fs::path& entry) {
        const auto name = entry.filename().string();
        return name == "latest_checkpointed_iteration.txt" ||
               name.starts_with("mp_rank_") ||
               (name == "metadata.json" && names_backend(entry));
      }) != entries.end();
  if (from_megatron) return megatron(path);
  const bool from_dcp = any([](const fs::path& entry) {
                          return entry.filename() == ".metadata" ||
                                 entry.extension() == ".distcp";
                        }) != entries.end();
  if (from_dcp) return dcp(path);
  const auto found =
      any([](const fs::path& entry) { return is_pickle(entry); });
  return found == entries.end() ? "" : pickle(*found);
}

}  // namespace echelon
