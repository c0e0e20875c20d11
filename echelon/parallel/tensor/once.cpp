#include "echelon/parallel/tensor/once.h"

#include <torch/types.h>

#include "echelon/error.h"

namespace echelon::detail {

void refuse_second_derivative(const std::string& function) {
  if (!torch::GradMode::is_enabled()) return;
  throw Error(
      "[tensor parallel] the backward of " + function +
      " cannot be differentiated again; call backward without create_graph");
}

}  // namespace echelon::detail
