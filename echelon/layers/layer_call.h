// Calls a layer's forward, whatever its signature, with a tuple of tensors. For
// layer_list.h alone.
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <concepts>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "echelon/error.h"

namespace echelon {

/// The tensors that a layer passes to the next: few, and all defined.
using Tensors = std::vector<torch::Tensor>;

namespace detail {

/// A forward with more tensors must take Tensors.
inline constexpr size_t kMostTensors = 8;

template <size_t I>
using TensorNumber = const torch::Tensor&;

template <class F, size_t... I>
constexpr bool takes_these(std::index_sequence<I...>) {
  return std::invocable<const F&, TensorNumber<I>...>;
}
/// Whether `f(tensor, …)` compiles with that many tensors.
template <class F, size_t count>
inline constexpr bool
    kTakes = takes_these<F>(std::make_index_sequence<count>());
/// Whether `f(tensors)` compiles.
template <class F>
inline constexpr bool kTakesAll = std::invocable<const F&, const Tensors&>;

template <class F, size_t... I>
constexpr bool takes_some(std::index_sequence<I...>) {
  return (kTakes<F, I + 1> || ...);
}

/// Thrown for a wrong number of tensors; run_layer adds where they come from.
class WrongNumberOfTensors : public ConfigError {
 public:
  using ConfigError::ConfigError;
};
[[noreturn]] void wrong_number_of_tensors(
    const std::string& layer, const std::vector<size_t>& taken, size_t given);

/// Throws ConfigError when there is no tensor, or an undefined one.
void check_outputs(const std::string& layer, const Tensors& outputs);

/// The message of `error` up to its first line break, without the stack trace
/// that LibTorch adds.
std::string first_line(const std::exception& error);

template <class Result>
void append_tensors(Tensors& tensors, Result&& result) {
  using Plain = std::remove_cvref_t<Result>;
  if constexpr (std::is_convertible_v<Plain, torch::Tensor>) {
    tensors.push_back(std::forward<Result>(result));
  } else if constexpr (std::is_same_v<Plain, Tensors>) {
    tensors.insert(tensors.end(), result.begin(), result.end());
  } else {
    static_assert(
        requires { std::tuple_size<Plain>::value; },
        "a layer's forward returns a tensor, a std::tuple of tensors or "
        "Tensors");
    std::apply(
        [&](auto&&... each) {
          (append_tensors(tensors, std::forward<decltype(each)>(each)), ...);
        },
        std::forward<Result>(result));
  }
}

template <class Result>
Tensors to_tensors(Result&& result) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Result>, Tensors>) {
    return std::forward<Result>(result);
  } else {
    Tensors tensors;
    append_tensors(tensors, std::forward<Result>(result));
    return tensors;
  }
}

template <class F, size_t... I>
Tensors
call_with(const F& forward, const Tensors& inputs, std::index_sequence<I...>) {
  return to_tensors(forward(inputs[I]...));
}

/// forward(inputs[0], inputs[1], …), or forward(inputs) when it does not take
/// separate tensors.
template <class F>
Tensors
call_layer(const std::string& layer, const F& forward, const Tensors& inputs) {
  using Numbers = std::make_index_sequence<kMostTensors>;
  Tensors outputs;
  if constexpr (takes_some<F>(Numbers())) {
    std::vector<size_t> taken;
    const auto try_number = [&]<size_t count>() {
      if constexpr (kTakes<F, count>) {
        taken.push_back(count);
        if (inputs.size() != count) return;
        outputs = call_with(forward, inputs, std::make_index_sequence<count>());
      }
    };
    [&]<size_t... I>(std::index_sequence<I...>) {
      (try_number.template operator()<I + 1>(), ...);
    }
    (Numbers());
    if (std::ranges::count(taken, inputs.size()) == 0) {
      wrong_number_of_tensors(layer, taken, inputs.size());
    }
  } else {
    static_assert(
        kTakesAll<F>, "a layer's forward takes 1 to 8 tensors, or Tensors");
    outputs = to_tensors(forward(inputs));
  }
  check_outputs(layer, outputs);
  return outputs;
}

template <class M>
struct ForwardOf {
  std::shared_ptr<M> module;

  template <class... T>
  auto operator()(const T&... inputs) const
      -> decltype(std::declval<M&>().forward(inputs...)) {
    return module->forward(inputs...);
  }
};
template <class M>
ForwardOf(std::shared_ptr<M>) -> ForwardOf<M>;

template <class M, class F>
struct BoundForward {
  std::shared_ptr<M> module;
  F function;

  template <class... T>
  requires std::invocable<const F&, M&, const T&...>
  auto operator()(const T&... inputs) const {
    return function(*module, inputs...);
  }
};
template <class M, class F>
BoundForward(std::shared_ptr<M>, F) -> BoundForward<M, F>;

template <class M>
std::shared_ptr<M> module_of(std::shared_ptr<M> module) {
  return module;
}
template <class Holder>
requires requires(const Holder& holder) {
  holder.ptr();
}
auto module_of(const Holder& holder) {
  return holder.ptr();
}

}  // namespace detail
}  // namespace echelon
