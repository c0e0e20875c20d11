// Which parameters of a model train: all, those that [model] freeze does not
// name, or the adapters that [lora] adds. Free of LibTorch, so that the command
// line can check the names before any rank starts.
//
// Adapters: Hu et al., "LoRA", 2021, arXiv:2106.09685. A linear layer NAME with
// a matrix of `in` inputs and `out` outputs gets
//
//   NAME.lora_A.weight  [rank, in], normal with standard deviation 1/sqrt(in)
//   NAME.lora_B.weight  [out, rank], zero
//
// and adds alpha / rank * B A x to its result for x.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/options/model.h"

namespace echelon {

/// The ends of the names of an adapter's two matrices.
inline constexpr std::string_view kAdapterA = ".lora_A.weight";
inline constexpr std::string_view kAdapterB = ".lora_B.weight";

/// Whether the parameter belongs to an adapter.
bool is_adapter(std::string_view parameter);

/// The linear layers of a language model's list that get adapters, in the order
/// of the list. Those of attention, MLPs and experts can have them; routers,
/// embeddings, the head and the products of low rank cannot
/// (ParameterInfo::takes_adapter). Throws ConfigError for a target
/// that names none of them, with the nearest names, and for a rank without
/// targets.
std::vector<std::string>
adapted_layers(const LoraOptions& lora, const std::vector<ParameterInfo>& list);

/// The list of a language model with the adapters behind the parameters of
/// their layers. Throws as adapted_layers().
///
///   in_by_out  matrices are [in, out], as those of GPT-2
std::vector<ParameterInfo> with_adapters(
    const LoraOptions& lora, std::vector<ParameterInfo> list, bool in_by_out);

/// Whether checkpoints have the adapters alone, since [model] weights has the
/// parameters that they are added to.
bool saves_adapters_alone(const ModelOptions& options);

/// The names of the parameters that do not train: with options.lora all but
/// the adapters, and those that options.freeze matches. A tied parameter is
/// frozen when a pattern matches one of its names, and all of them are
/// returned.
///
///   patterns  as fnmatch(3) reads them: * stands for any text, ? for one
///             character, [ab] for one of these
///   list      every name of each parameter, tied ones with tied_to
///
/// Throws ConfigError for a pattern that matches no parameter, with the
/// nearest name, and for patterns that leave nothing to train.
std::set<std::string> frozen_parameters(
    const ModelOptions& options, const std::vector<ParameterInfo>& list);

}  // namespace echelon
