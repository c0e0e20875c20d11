# echelon_tests([TORCH]
#   UNIT a_test b_test  RANKS c_test  PROCS ...  PYTORCH ...  BROWSER ...  GPU ...  SLURM ...
#   [SOURCES helper.cpp ...] [NEEDS program ...] [LIBRARIES PNG::PNG ...]
#   [LONG c_test ...])
#
# One GoogleTest program for a folder, and one CTest entry for each of its files: the
# program with a filter for the suites of that file. The lists name the files without
# .cpp, under the file's label (doc/testing.md). LONG names those that take longest,
# which CTest starts first. NEEDS lists the programs that the tests start. An entry
# whose every test was skipped exits with 77, which CTest reports as skipped, with
# the reason that it printed.
#
# The files are compiled together where ECHELON_UNITY is on, so each has a namespace
# of its own: echelon::a_test.
find_package(GTest REQUIRED)

set(_echelon_labels UNIT RANKS PROCS PYTORCH BROWSER GPU SLURM)
set(ECHELON_TEST_TIMEOUT 600 CACHE STRING "seconds that one test file may take")

# Precompiled: GoogleTest, and LibTorch in the training wing. Tests need no
# optimisation beyond -O1, which compiles faster.
set(_echelon_test_flags $<$<CXX_COMPILER_ID:GNU,Clang>:-O1>)
function(_echelon_test_pch name)
  cmake_parse_arguments(P "TORCH" "" "HEADERS" ${ARGN})
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${name}.cpp" CONTENT "" @ONLY)
  add_library(${name} OBJECT "${PROJECT_BINARY_DIR}/${name}.cpp")
  target_link_libraries(${name} PRIVATE GTest::gtest GTest::gmock Threads::Threads)
  if(P_TORCH)
    target_link_libraries(${name} PRIVATE echelon::libtorch)
  endif()
  target_compile_options(${name} PRIVATE ${_echelon_test_flags})
  target_precompile_headers(${name} PRIVATE ${P_HEADERS})
endfunction()
_echelon_test_pch(echelon_test_pch HEADERS <gmock/gmock.h> <gtest/gtest.h>)
if(ECHELON_WITH_TORCH)
  _echelon_test_pch(echelon_torch_test_pch TORCH
    HEADERS <torch/torch.h> <gmock/gmock.h> <gtest/gtest.h>)
endif()

# The pattern that selects the suites of a file.
function(echelon_suites file result)
  file(STRINGS "${file}" lines REGEX "^(TEST|TEST_F|TEST_P|TYPED_TEST)\\(")
  set(filter)
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^[A-Z_]+\\(([A-Za-z0-9_]+),.*" "\\1" suite "${line}")
    list(APPEND filter "${suite}.*" "*/${suite}.*")
    if(line MATCHES "^TYPED_TEST")
      list(APPEND filter "${suite}/*")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES filter)
  list(JOIN filter ":" filter)
  set(${result} "${filter}" PARENT_SCOPE)
endfunction()

# One entry of CTest: NAME, LABEL, the program, and the filter.
function(echelon_test_entry name label program filter)
  add_test(NAME ${name} COMMAND ${program} "--gtest_filter=${filter}")
  set_tests_properties(${name} PROPERTIES
    LABELS "${label}" TIMEOUT ${ECHELON_TEST_TIMEOUT} SKIP_RETURN_CODE 77)
  if(label STREQUAL "gpu")
    set_tests_properties(${name} PROPERTIES ENVIRONMENT ECHELON_TEST_GPU=1)
  endif()
endfunction()

function(echelon_tests)
  cmake_parse_arguments(T "TORCH" "" "${_echelon_labels};SOURCES;NEEDS;LIBRARIES;LONG" ${ARGN})
  if(T_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "echelon_tests: unexpected ${T_UNPARSED_ARGUMENTS}")
  endif()
  if(T_TORCH AND NOT ECHELON_WITH_TORCH)
    return()
  endif()
  file(RELATIVE_PATH folder
    "${PROJECT_SOURCE_DIR}/tests" "${CMAKE_CURRENT_SOURCE_DIR}")
  string(REPLACE "/" "_" folder "${folder}")
  set(program ${folder}_tests)
  if(T_TORCH AND TARGET ${program})
    set(program ${folder}_torch_tests)
  endif()
  set(sources)
  foreach(label IN LISTS _echelon_labels)
    foreach(name IN LISTS T_${label})
      list(APPEND sources ${name}.cpp)
    endforeach()
  endforeach()
  echelon_unity(sources ${program} 5 ${sources})
  add_executable(${program} ${sources} ${T_SOURCES}
    "${PROJECT_SOURCE_DIR}/tests/support/main.cpp")
  echelon_warnings(${program})
  target_include_directories(${program} PRIVATE "${PROJECT_SOURCE_DIR}")
  # A precompiled header serves one setting of -fPIC and -fPIE.
  set_target_properties(${program} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${program} PRIVATE -fPIC ${_echelon_test_flags})
  # The paths are defined for single files alone: the others compile to the same in
  # every checkout, and so do the precompiled headers.
  set_target_properties(${program} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_link_libraries(${program} PRIVATE
    ${T_LIBRARIES} echelon::test_support GTest::gtest GTest::gmock)
  if(T_TORCH)
    echelon_use_torch(${program})
    target_link_libraries(${program} PRIVATE echelon::echelon)
    target_precompile_headers(${program} REUSE_FROM echelon_torch_test_pch)
  else()
    target_link_libraries(${program} PRIVATE echelon::plain)
    target_precompile_headers(${program} REUSE_FROM echelon_test_pch)
  endif()
  if(T_NEEDS)
    add_dependencies(${program} ${T_NEEDS})
  endif()
  foreach(label IN LISTS _echelon_labels)
    string(TOLOWER ${label} lower)
    foreach(name IN LISTS T_${label})
      echelon_suites("${CMAKE_CURRENT_SOURCE_DIR}/${name}.cpp" filter)
      set(entry "${folder}/${name}")
      string(REGEX REPLACE "_test$" "" entry "${entry}")
      echelon_test_entry(${entry} ${lower} ${program} "${filter}")
      if(name IN_LIST T_LONG)
        set_tests_properties(${entry} PROPERTIES COST 1000)
      endif()
    endforeach()
  endforeach()
endfunction()

# A program that tests start.
function(echelon_test_program name)
  cmake_parse_arguments(P "TORCH" "" "SOURCES;LIBRARIES" ${ARGN})
  if(P_TORCH AND NOT ECHELON_WITH_TORCH)
    return()
  endif()
  add_executable(${name} ${P_SOURCES})
  echelon_warnings(${name})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${_echelon_test_flags})
  target_link_libraries(${name} PRIVATE ${P_LIBRARIES})
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  if(P_TORCH)
    echelon_use_torch(${name})
    target_link_libraries(${name} PRIVATE echelon::echelon GTest::gtest)
    target_precompile_headers(${name} REUSE_FROM echelon_torch_test_pch)
  else()
    target_link_libraries(${name} PRIVATE echelon::plain)
  endif()
endfunction()
