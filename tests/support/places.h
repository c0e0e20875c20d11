// Where the checkout and the build's programs are. Only places.cpp is compiled
// with these paths, so that the other files compile to the same in every
// checkout.
#pragma once

#include <string>

namespace echelon {

/// The checkout's folder, or a path in it.
std::string source_path(const std::string& name = "");

/// A program of the build: program("echelon").
std::string program(const std::string& name);

/// A program or library that tests alone use: test_program("launch_run").
std::string test_program(const std::string& name);

}  // namespace echelon
