# echelon_test(NAME mesh_test LABEL unit SOURCES mesh_test.cpp DEPENDS ... [TORCH])
#
# One GoogleTest program, one CTest entry. A program whose every test was
# skipped exits 77, which CTest reports as skipped, with the reason it printed.
# LABEL: unit, ranks, procs, browser, pytorch, gpu (see doc/testing.md).
find_package(GTest REQUIRED)

# ECHELON_SOURCE_DIR and ECHELON_BIN_DIR are defined for the files that name
# them, directly or through a header of tests/; the others compile to the same
# in every checkout, so the compiler's cache serves them all.
set(_echelon_places "ECHELON_SOURCE_DIR|ECHELON_BIN_DIR")
file(GLOB_RECURSE _headers "${PROJECT_SOURCE_DIR}/tests/*.h")
foreach(_header IN LISTS _headers)
  file(STRINGS "${_header}" _lines REGEX "ECHELON_(SOURCE|BIN)_DIR")
  if(_lines)
    cmake_path(GET _header FILENAME _name)
    string(APPEND _echelon_places "|include.*/${_name}")
  endif()
endforeach()

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
  foreach(source IN LISTS T_SOURCES)
    file(STRINGS "${source}" lines REGEX "${_echelon_places}")
    if(lines)
      set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_DEFINITIONS
        ECHELON_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
        ECHELON_BIN_DIR="${PROJECT_BINARY_DIR}/bin")
    endif()
  endforeach()
  add_test(NAME ${T_NAME} COMMAND ${T_NAME} ${T_ARGS})
  set_tests_properties(${T_NAME} PROPERTIES
    LABELS "${T_LABEL}" TIMEOUT ${T_TIMEOUT} SKIP_RETURN_CODE 77
    ENVIRONMENT "${T_ENVIRONMENT}")
  # The longest first, also where no earlier run has told how long they take.
  if(T_TIMEOUT GREATER 300)
    set_tests_properties(${T_NAME} PROPERTIES COST ${T_TIMEOUT})
  endif()
endfunction()
