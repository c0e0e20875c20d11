// For the autograd functions of this folder.
#pragma once

#include <string>

namespace echelon::detail {

/// Throws Error when backward is itself being recorded (create_graph): what the
/// functions of this folder return then would look like constants.
void refuse_second_derivative(const std::string& function);

}  // namespace echelon::detail
