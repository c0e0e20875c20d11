// A library that tests load: the parts of own_parts.h, on data that it has.
#include <cstdio>
#include <cstdlib>

#include "echelon/train/plugin.h"
#include "tests/train/own/own_parts.h"

namespace {

// What runs when the library is loaded.
struct Loaded {
  Loaded() { std::fprintf(stderr, "own_plugin was loaded\n"); }
} loaded;

echelon::OwnParts parts(const echelon::Job& job) {
  const char* what = std::getenv("OWN_PLUGIN");
  if (what != nullptr && std::string(what) == "throws") {
    throw std::runtime_error("no weights here");
  }
  echelon::OwnParts own = echelon::own_parts();
  if (job.data.name != echelon::DataKind::own && what == nullptr) {
    own.dataset = nullptr;  // a model and a loss for data of Echelon
    own.objective = nullptr;
    own.metrics.clear();
  }
  return own;
}

}  // namespace

ECHELON_PLUGIN(parts);
