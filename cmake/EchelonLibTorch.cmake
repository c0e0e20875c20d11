# LibTorch from a wheel, without its own CMake package: that one asks for a CUDA
# toolkit. Defines the target echelon_libtorch, ECHELON_WITH_TORCH and
# ECHELON_LIBTORCH_VERSION.
set(ECHELON_WITH_TORCH OFF)
if(ECHELON_LIBTORCH)
  if(NOT EXISTS "${ECHELON_LIBTORCH}/lib/libtorch_cpu.so")
    message(FATAL_ERROR
      "ECHELON_LIBTORCH=${ECHELON_LIBTORCH} has no lib/libtorch_cpu.so")
  endif()
  set(ECHELON_WITH_TORCH ON)
  file(STRINGS "${ECHELON_LIBTORCH}/include/torch/headeronly/version.h" _lines
    REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2"
    ECHELON_LIBTORCH_VERSION "${_lines}")
  if(NOT ECHELON_LIBTORCH_VERSION MATCHES "^2[.](11|15)$")
    message(FATAL_ERROR "Echelon is built with LibTorch 2.11 or 2.15; \
${ECHELON_LIBTORCH} is ${ECHELON_LIBTORCH_VERSION}")
  endif()

  # The wheels put CUDA's and NCCL's headers and libraries beside torch/.
  cmake_path(GET ECHELON_LIBTORCH PARENT_PATH ECHELON_WHEELS)
  add_library(echelon_libtorch INTERFACE)
  target_include_directories(echelon_libtorch SYSTEM INTERFACE
    "$<BUILD_INTERFACE:${ECHELON_LIBTORCH}/include>"
    "$<BUILD_INTERFACE:${ECHELON_LIBTORCH}/include/torch/csrc/api/include>")
  target_compile_definitions(echelon_libtorch INTERFACE
    NDEBUG USE_DISTRIBUTED USE_C10D_GLOO FMT_HEADER_ONLY)
  target_link_libraries(echelon_libtorch INTERFACE
    "$<BUILD_INTERFACE:${ECHELON_LIBTORCH}/lib/libtorch_cpu.so>"
    "$<BUILD_INTERFACE:${ECHELON_LIBTORCH}/lib/libc10.so>")
  target_link_options(echelon_libtorch INTERFACE
    LINKER:--as-needed,--disable-new-dtags
    "$<BUILD_INTERFACE:LINKER:-rpath-link,${ECHELON_WHEELS}/nvidia/cu13/lib>")
  set_target_properties(echelon_libtorch PROPERTIES EXPORT_NAME libtorch)
  add_library(echelon::libtorch ALIAS echelon_libtorch)

  # One precompiled header for the whole training wing. All of <torch/torch.h> would
  # make each source instantiate templates that it does not use, for two seconds more.
  file(WRITE "${PROJECT_BINARY_DIR}/echelon_pch.cpp.in" "")
  configure_file("${PROJECT_BINARY_DIR}/echelon_pch.cpp.in"
    "${PROJECT_BINARY_DIR}/echelon_pch.cpp" COPYONLY)
  add_library(echelon_pch OBJECT "${PROJECT_BINARY_DIR}/echelon_pch.cpp")
  target_link_libraries(echelon_pch PRIVATE echelon_libtorch)
  target_precompile_headers(echelon_pch PRIVATE
    <torch/types.h> <torch/nn/module.h> <torch/utils.h>)
else()
  message(STATUS "ECHELON_LIBTORCH is empty: only the plain wing is built")
endif()
