// --name value pairs of a benchmark's command line.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "echelon/error.h"

namespace echelon {

class Arguments {
 public:
  /// A name that is followed by another name, or by nothing, is a switch.
  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      const bool has_value = i + 1 < argc && argv[i + 1][0] != '-';
      values_[name].push_back(has_value ? argv[++i] : "");
    }
  }

  /// Throws ConfigError for an argument that is none of `names`.
  void allow(const std::vector<std::string>& names) const {
    std::string all;
    for (const auto& name : names) all += (all.empty() ? "" : ", ") + name;
    for (const auto& [name, _] : values_) {
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        throw ConfigError("unknown argument " + name + "; there are " + all);
      }
    }
  }

  bool has(const std::string& name) const { return values_.contains(name); }
  const std::string& text(const std::string& name) const {
    if (!has(name)) {
      throw ConfigError("the argument " + name + " is missing");
    }
    return values_.at(name).back();
  }
  int64_t integer(const std::string& name) const {
    return std::atoll(text(name).c_str());
  }
  double number(const std::string& name) const {
    return std::atof(text(name).c_str());
  }
  std::vector<int64_t> integers(const std::string& name) const {
    std::vector<int64_t> result;
    if (has(name)) {
      for (const auto& value : values_.at(name)) {
        result.push_back(std::atoll(value.c_str()));
      }
    }
    return result;
  }

 private:
  std::map<std::string, std::vector<std::string>> values_;
};

}  // namespace echelon
