// Where first values come from. Free of LibTorch.
#pragma once

namespace echelon {

/// The distribution that a tensor's first value is drawn from.
struct InitialValue {
  enum class Kind {
    constant,  // every element is `value`
    uniform,   // between -value and value
    normal,    // mean 0, standard deviation `value`
  };
  Kind kind = Kind::constant;
  double value = 0.0;
  bool operator==(const InitialValue&) const = default;

  static InitialValue constant_of(double value) {
    return {Kind::constant, value};
  }
  static InitialValue uniform_within(double bound) {
    return {Kind::uniform, bound};
  }
  static InitialValue normal_of(double standard_deviation) {
    return {Kind::normal, standard_deviation};
  }
};

}  // namespace echelon
