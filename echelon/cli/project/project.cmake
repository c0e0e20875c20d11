# @NAME@, against an installed Echelon:
#
#   cmake -B build && cmake --build build
#
# CMake finds Echelon where `echelon` is in PATH. Otherwise add
# -DCMAKE_PREFIX_PATH=<where Echelon is installed>.
cmake_minimum_required(VERSION 3.25)
project(@NAME@ LANGUAGES CXX)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# LibTorch's kernels compute. With -O1 a rebuild takes a third less time than
# with -O3; choose that for hot loops of your own.
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
find_package(Echelon REQUIRED)

# A library that `echelon train` loads ([model] library in train.toml).
add_library(@NAME@ SHARED model.cpp)
target_link_libraries(@NAME@ PRIVATE Echelon::plugin)
echelon_precompile(@NAME@)

enable_testing()
find_program(ECHELON echelon REQUIRED HINTS "${Echelon_BINDIR}")
foreach(layout IN ITEMS dp=2 pp=2)
  add_test(NAME equals_one_device_${layout}
    COMMAND "${ECHELON}" verify train.toml -n 2 --layout ${layout}
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
endforeach()
