# echelon_test(NAME mesh_test LABEL unit SOURCES mesh_test.cpp DEPENDS ... [TORCH])
#
# One GoogleTest program, one CTest entry. A program whose every test was
# skipped exits 77, which CTest reports as skipped, with the reason it printed.
# LABEL: unit, ranks, procs, browser, pytorch, gpu (see doc/testing.md).
find_package(GTest REQUIRED)

function(echelon_test)
  cmake_parse_arguments(T "TORCH" "NAME;TIMEOUT;LABEL" "SOURCES;DEPENDS;ARGS;ENVIRONMENT" ${ARGN})
  if(T_TORCH AND NOT ECHELON_WITH_TORCH)
    return()
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 120)
  endif()
  set(torch)
  if(T_TORCH)
    set(torch TORCH)
  endif()
  echelon_program(NAME ${T_NAME} ${torch}
    SOURCES ${T_SOURCES} "${PROJECT_SOURCE_DIR}/tests/support/main.cpp"
    DEPENDS ${T_DEPENDS} GTest::gtest GTest::gmock)
  set_target_properties(${T_NAME} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_compile_definitions(${T_NAME} PRIVATE
    ECHELON_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
    ECHELON_BIN_DIR="${PROJECT_BINARY_DIR}/bin")
  add_test(NAME ${T_NAME} COMMAND ${T_NAME} ${T_ARGS})
  set_tests_properties(${T_NAME} PROPERTIES
    LABELS "${T_LABEL}" TIMEOUT ${T_TIMEOUT} SKIP_RETURN_CODE 77
    ENVIRONMENT "${T_ENVIRONMENT}")
endfunction()
