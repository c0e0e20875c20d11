#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/checkpoint/format/new_file.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::safetensors {
namespace {

constexpr uint64_t kAlignment = 64;  // of the data section

void check(const std::string& path, const std::vector<TensorBytes>& tensors) {
  std::set<std::string> names = {"__metadata__"};
  for (const auto& tensor : tensors) {
    const std::string place =
        path + ": tensor " + quote_printable(tensor.name) + ": ";
    if (!names.insert(tensor.name).second) {
      throw ConfigError(place + "the name is taken; each needs its own");
    }
    const uint64_t width = dtype_bytes(tensor.dtype);
    if (width == 0) {
      throw ConfigError(format(
          "{}unknown dtype {}; known are {}", place,
          quote_printable(tensor.dtype), known_dtypes()));
    }
    const auto bytes = tensor_bytes(tensor.shape, width);
    if (tensor.shape.size() > kMaxDims || !bytes ||
        *bytes != tensor.bytes.size()) {
      throw ConfigError(format(
          "{}shape {} of {} does not match its {} bytes", place,
          shape_string(tensor.shape), tensor.dtype, tensor.bytes.size()));
    }
  }
}

/// Wider dtypes first: the narrower ones are then aligned without gaps.
std::vector<const TensorBytes*>
in_file_order(const std::vector<TensorBytes>& tensors) {
  std::vector<const TensorBytes*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(
      order.begin(), order.end(), [](const auto* a, const auto* b) {
        return dtype_bytes(a->dtype) > dtype_bytes(b->dtype);
      });
  return order;
}

std::string header_text(
    const std::string& path, const std::vector<const TensorBytes*>& tensors,
    const Metadata& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  // push_back of pairs: ordered_json would search for each name it is given.
  auto& members = json.get_ref<nlohmann::ordered_json::object_t&>();
  uint64_t begin = 0;
  for (const auto* tensor : tensors) {
    const uint64_t end = begin + tensor->bytes.size();
    nlohmann::ordered_json entry;
    entry["dtype"] = tensor->dtype;
    entry["shape"] = tensor->shape;
    entry["data_offsets"] = {begin, end};
    members.std::vector<std::pair<const std::string, nlohmann::ordered_json>>::
        emplace_back(tensor->name, std::move(entry));
    begin = end;
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception&) {
    throw ConfigError(path + ": a name or a metadata text is not UTF-8");
  }
  text.append((kAlignment - (8 + text.size()) % kAlignment) % kAlignment, ' ');
  if (text.size() > kMaxHeaderBytes) {
    throw ConfigError(format(
        "{}: its header would take {} bytes; the limit is {}", path,
        text.size(), kMaxHeaderBytes));
  }
  return text;
}

}  // namespace

FilePlan plan_file(
    const std::string& path, const std::vector<TensorBytes>& tensors,
    const Metadata& metadata) {
  check(path, tensors);
  FilePlan plan;
  plan.order = in_file_order(tensors);
  const std::string header = header_text(path, plan.order, metadata);
  for (size_t i = 0; i < 8; ++i) {
    plan.head += static_cast<char>(header.size() >> (8 * i));
  }
  plan.head += header;
  plan.bytes = plan.head.size();
  for (const auto* tensor : plan.order) plan.bytes += tensor->bytes.size();
  return plan;
}

void write(
    const std::string& path, const std::vector<TensorBytes>& tensors,
    const Metadata& metadata) {
  const FilePlan plan = plan_file(path, tensors, metadata);
  NewFile file(path, plan.bytes, NewFile::Under::beside);
  file.append(plan.head.data(), plan.head.size());
  for (const auto* tensor : plan.order) {
    file.append(tensor->bytes.data(), tensor->bytes.size());
  }
  file.move_into_place();
}

}  // namespace echelon::safetensors
