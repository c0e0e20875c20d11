// The published schemas of the objects that manifests have, which are in
// schemas/: tests/deploy/manifests.py makes them from those of the projects.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace echelon::deploy {

/// The repository and version of the schema for objects of this kind:
/// "kubernetes-sigs/jobset v0.12.0". Empty: there is none.
std::string schema_source(const std::string& kind);

/// What the schema does not allow, each with its place:
/// "spec.failurePolicy.maxRestart: there is no such field". Jobs and pods
/// inside of other objects are checked by the schemas of Kubernetes.
std::vector<std::string> schema_problems(const nlohmann::ordered_json& object);

}  // namespace echelon::deploy
