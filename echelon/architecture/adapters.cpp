// A matrix with an adapter is read piece by piece like any other: its elements
// of the base, and then, row by row, the products of the adapter that belong
// there. A and B are small, so they are read whole for each piece.
#include "echelon/architecture/adapters.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr const char* kWide = "F64";

std::map<std::string, size_t> numbers_by_name(const TensorSource& source) {
  std::map<std::string, size_t> numbers;
  for (size_t i = 0; i < source.tensors().size(); ++i) {
    numbers[source.tensors()[i].name] = i;
  }
  return numbers;
}

// "model.layers.0.self_attn.q_proj" of an adapter's matrix.
std::string layer_of_adapter(const std::string& name) {
  return name.substr(0, name.size() - kAdapterA.size());
}

// Elements of a tensor in float64.
std::vector<double>
read_wide(TensorSource& source, size_t tensor, const IndexRange& elements) {
  const auto& facts = source.tensors()[tensor];
  const auto count = static_cast<size_t>(elements.size());
  std::vector<std::byte> bytes(
      count * static_cast<size_t>(safetensors::dtype_bytes(facts.dtype)));
  source.read({{tensor, elements, bytes.data()}});
  std::vector<double> values(count);
  if (facts.dtype == kWide) {
    std::copy_n(
        bytes.data(), bytes.size(),
        reinterpret_cast<std::byte*>(values.data()));
  } else {
    convert_floats(
        facts.dtype, bytes.data(), kWide,
        reinterpret_cast<std::byte*>(values.data()), elements.size());
  }
  return values;
}

}  // namespace

AdaptedTensors::AdaptedTensors(
    std::shared_ptr<TensorSource> base, std::shared_ptr<TensorSource> adapters,
    double scale, bool in_by_out)
    : base_(std::move(base)),
      adapters_(std::move(adapters)),
      scale_(scale),
      in_by_out_(in_by_out) {
  const auto& all = adapters_->tensors();
  auto numbers = numbers_by_name(*adapters_);
  const auto fail = [&](const std::string& layer) {
    throw DataError(format(
        "{}: the adapter of \"{}\" does not fit the matrix of {}; name the "
        "weights that it was trained with",
        adapters_->path(), layer, base_->path()));
  };
  std::set<std::string> left;
  for (const auto& one : all) {
    if (is_adapter(one.name)) left.insert(layer_of_adapter(one.name));
  }
  for (size_t i = 0; i < base_->tensors().size(); ++i) {
    TensorFacts facts = base_->tensors()[i];
    if (is_adapter(facts.name)) continue;
    std::unique_ptr<Adapter> adapter;
    const std::string layer = facts.name.substr(0, facts.name.rfind('.'));
    if (facts.name.ends_with(".weight") && left.erase(layer) > 0) {
      const auto a = numbers.find(layer + std::string(kAdapterA));
      const auto b = numbers.find(layer + std::string(kAdapterB));
      if (a == numbers.end() || b == numbers.end()) fail(layer);
      const auto& shape_a = all[a->second].shape;
      const auto& shape_b = all[b->second].shape;
      auto matrix = facts.shape;
      if (in_by_out) std::reverse(matrix.begin(), matrix.end());
      if (shape_a.size() != 2 || shape_b.size() != 2 ||
          shape_a[0] != shape_b[1] ||
          matrix != std::vector<int64_t>{shape_b[0], shape_a[1]} ||
          !is_float_dtype(facts.dtype)) {
        fail(layer);
      }
      adapter =
          std::make_unique<Adapter>(Adapter{a->second, b->second, shape_a[0]});
      facts.dtype = all[a->second].dtype;
    }
    facts_.push_back(std::move(facts));
    numbers_.push_back(i);
    adapted_.push_back(std::move(adapter));
  }
  if (!left.empty()) fail(*left.begin());
}

void AdaptedTensors::read(const std::vector<Piece>& pieces) {
  std::vector<Piece> plain;
  for (const auto& piece : pieces) {
    if (adapted_[piece.tensor]) {
      add_product(piece);
    } else {
      plain.push_back({numbers_[piece.tensor], piece.elements, piece.to});
    }
  }
  if (!plain.empty()) base_->read(plain);
}

// Element (i, j) of W [out, in] gets scale * sum over k of B[i, k] A[k, j].
void AdaptedTensors::add_product(const Piece& piece) {
  const auto& adapter = *adapted_[piece.tensor];
  const auto& facts = facts_[piece.tensor];
  const auto whole = [&](size_t tensor) {
    return read_wide(
        *adapters_, tensor, {0, adapters_->tensors()[tensor].numel()});
  };
  const auto a = whole(adapter.a);
  const auto b = whole(adapter.b);
  auto values = read_wide(*base_, numbers_[piece.tensor], piece.elements);
  const int64_t columns = facts.shape[1];
  const int64_t in = in_by_out_ ? facts.shape[0] : facts.shape[1];
  for (int64_t at = piece.elements.begin; at < piece.elements.end;) {
    const int64_t row = at / columns;
    const int64_t end = std::min((row + 1) * columns, piece.elements.end);
    for (int64_t k = 0; k < adapter.rank; ++k) {
      for (int64_t e = at; e < end; ++e) {
        const int64_t column = e % columns;
        const int64_t i = in_by_out_ ? column : row;
        const int64_t j = in_by_out_ ? row : column;
        values[static_cast<size_t>(e - piece.elements.begin)] +=
            scale_ * b[static_cast<size_t>(i * adapter.rank + k)] *
            a[static_cast<size_t>(k * in + j)];
      }
    }
    at = end;
  }
  const auto* from = reinterpret_cast<const std::byte*>(values.data());
  if (facts.dtype == kWide) {
    std::copy_n(from, values.size() * sizeof(double), piece.to);
  } else {
    convert_floats(kWide, from, facts.dtype, piece.to, piece.elements.size());
  }
}

std::vector<TensorToWrite>
peft_tensors(const TensorSource& source, const std::string& dtype) {
  std::vector<TensorToWrite> tensors;
  for (size_t i = 0; i < source.tensors().size(); ++i) {
    const auto& one = source.tensors()[i];
    if (!is_adapter(one.name)) continue;
    tensors.push_back(
        {i, "base_model.model." + one.name, dtype.empty() ? one.dtype : dtype});
  }
  return tensors;
}

std::string peft_config(
    const LoraOptions& lora, const std::string& base,
    const std::vector<ParameterInfo>& list, bool in_by_out) {
  // The last part of a name where all layers with it have adapters, else
  // complete names: peft gives adapters to experts too.
  constexpr std::string_view kWeight = ".weight";
  const auto last = [](const std::string& name) {
    return name.substr(name.rfind('.') + 1);
  };
  const auto adapted = adapted_layers(lora, list);
  std::map<std::string, int64_t> without;
  for (const auto& info : list) {
    if (!info.name.ends_with(kWeight)) continue;
    ++without[last(info.name.substr(0, info.name.size() - kWeight.size()))];
  }
  for (const auto& layer : adapted) --without[last(layer)];
  std::set<std::string> targets;
  for (const auto& layer : adapted) {
    targets.insert(without[last(layer)] == 0 ? last(layer) : layer);
  }
  nlohmann::ordered_json config;
  config["peft_type"] = "LORA";
  config["task_type"] = "CAUSAL_LM";
  config["base_model_name_or_path"] = base;
  config["r"] = lora.rank;
  config["lora_alpha"] = lora.scale() * static_cast<double>(lora.rank);
  config["lora_dropout"] = 0.0;
  config["bias"] = "none";
  config["fan_in_fan_out"] = in_by_out;
  config["inference_mode"] = true;
  config["target_modules"] = targets;
  return config.dump(2) + "\n";
}

}  // namespace echelon
