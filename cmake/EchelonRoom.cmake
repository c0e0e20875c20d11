# echelon_room([TORCH] [OPTIMIZE 1|3]
#   SOURCES a.cpp ...  HEADERS a.h ...  DEPENDS echelon::layout ...  [PRIVATE ...])
#
# A folder is a room: one static library, named after the folder. echelon/comm/trace
# makes the library echelon_comm_trace, alias echelon::comm_trace. DEPENDS is the
# architecture drawing: what the room's headers may include. PRIVATE lists what only
# its .cpp files need. TORCH puts the room into the training wing. A release is
# compiled with -O2; OPTIMIZE 3 is for a room with hot loops of its own, OPTIMIZE 1
# for one that no step waits for, which compiles in two thirds of the time.
#
# With ECHELON_UNITY, several sources of a room are compiled as one: each source of
# the training wing on its own spends most of its time in LibTorch's headers. A
# source with SKIP_UNITY_BUILD_INCLUSION is compiled by itself.
find_package(Threads REQUIRED)

# The sources to compile in place of ARGN: files that include several of them each.
# Unlike those of CMake's UNITY_BUILD, they are the same in every checkout, so the
# compiler's cache serves them all.
function(echelon_unity result name size)
  if(NOT ECHELON_UNITY)
    set(${result} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  set(sources)
  set(text)
  set(count 0)
  set(number 0)
  foreach(source IN LISTS ARGN ITEMS "")
    get_source_file_property(alone "${source}" SKIP_UNITY_BUILD_INCLUSION)
    if(source STREQUAL "")
    elseif(alone OR IS_ABSOLUTE "${source}")
      list(APPEND sources "${source}")
    else()
      string(APPEND text "#include \"${folder}/${source}\"\n")
      set_source_files_properties("${source}" PROPERTIES HEADER_FILE_ONLY ON)
      list(APPEND sources "${source}")
      math(EXPR count "${count} + 1")
    endif()
    if(count EQUAL size OR (source STREQUAL "" AND count GREATER 0))
      set(file "${PROJECT_BINARY_DIR}/unity/${name}_${number}.cpp")
      file(CONFIGURE OUTPUT "${file}" CONTENT "${text}" @ONLY)
      list(APPEND sources "${file}")
      math(EXPR number "${number} + 1")
      set(text)
      set(count 0)
    endif()
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

function(echelon_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter
    -Wno-missing-field-initializers  # Options{.name = "x"} is how they are filled
    # Unity files include sources, whose anonymous namespaces g++ takes for a header's.
    $<$<AND:$<BOOL:${ECHELON_UNITY}>,$<CXX_COMPILER_ID:GNU>>:-Wno-subobject-linkage>
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)  # g++ 12: false alarms
endfunction()

function(echelon_torch_pch target)
  if(TARGET echelon_pch)
    target_precompile_headers(${target} REUSE_FROM echelon_pch)
  endif()
endfunction()

# Who links a static room links what its .cpp files need as well; but of a
# library that is headers alone nothing is left, and a user of the installed
# package need not have it.
function(echelon_link_private target)
  foreach(needed IN LISTS ARGN)
    set(imported FALSE)
    set(type)
    if(TARGET ${needed})
      get_target_property(imported ${needed} IMPORTED)
      get_target_property(type ${needed} TYPE)
    endif()
    if(imported AND type STREQUAL "INTERFACE_LIBRARY")
      target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:${needed}>)
    else()
      target_link_libraries(${target} PRIVATE ${needed})
    endif()
    if(imported AND needed MATCHES "^([A-Za-z0-9_]+)::"
        AND NOT type STREQUAL "INTERFACE_LIBRARY")
      set(package ${CMAKE_MATCH_1})
      if(package STREQUAL "SQLite")  # the one whose targets have another name
        set(package SQLite3)
      endif()
      set_property(GLOBAL APPEND PROPERTY ECHELON_PACKAGES ${package})
    endif()
  endforeach()
endfunction()

function(echelon_room)
  cmake_parse_arguments(ROOM "TORCH" "OPTIMIZE" "SOURCES;HEADERS;DEPENDS;PRIVATE" ${ARGN})
  if(ROOM_TORCH AND NOT ECHELON_WITH_TORCH)
    return()
  endif()
  file(RELATIVE_PATH ROOM_NAME
    "${PROJECT_SOURCE_DIR}/echelon" "${CMAKE_CURRENT_SOURCE_DIR}")
  string(REPLACE "/" "_" ROOM_NAME "${ROOM_NAME}")
  if(ROOM_NAME STREQUAL "")
    set(ROOM_NAME error)
  endif()
  set(target echelon_${ROOM_NAME})
  if(ROOM_SOURCES)
    echelon_unity(sources ${target} 8 ${ROOM_SOURCES})
    add_library(${target} STATIC ${sources})
    set(scope PUBLIC)
    echelon_warnings(${target})
    if(ROOM_OPTIMIZE)
      target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O${ROOM_OPTIMIZE}>)
    endif()
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
    if(ROOM_TORCH)
      target_link_libraries(${target} PUBLIC echelon::libtorch)
      echelon_torch_pch(${target})
    endif()
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
    if(ROOM_TORCH)
      target_link_libraries(${target} INTERFACE echelon::libtorch)
    endif()
  endif()
  add_library(echelon::${ROOM_NAME} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${ROOM_NAME})
  target_compile_features(${target} ${scope} cxx_std_20)
  target_sources(${target} ${scope} FILE_SET HEADERS
    BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${ROOM_HEADERS})
  target_link_libraries(${target} ${scope} ${ROOM_DEPENDS} Threads::Threads)
  echelon_link_private(${target} ${ROOM_PRIVATE})
  set_property(GLOBAL APPEND PROPERTY ECHELON_ROOMS ${target})
  if(ROOM_TORCH)
    set_property(GLOBAL APPEND PROPERTY ECHELON_TORCH_ROOMS ${target})
  endif()
endfunction()

# echelon_embed(OUTPUT NAMESPACE FILE ...)  writes a source that defines, for each
# file a/b.css, `const std::string_view NAMESPACE::b_css` with its content.
function(echelon_embed output namespace)
  set(source "// Generated from other files.\n#include <string_view>\n\n")
  string(APPEND source "namespace ${namespace} {\n")
  foreach(file IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
      "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
    get_filename_component(name "${file}" NAME)
    string(REPLACE "." "_" name "${name}")
    file(READ "${file}" content)
    string(APPEND source "extern const std::string_view ${name};\n"
      "constexpr std::string_view ${name} = R\"asset(${content})asset\";\n")
  endforeach()
  string(APPEND source "}  // namespace ${namespace}\n")
  set(old)
  if(EXISTS "${output}")
    file(READ "${output}" old)
  endif()
  if(NOT "${old}" STREQUAL "${source}")
    file(WRITE "${output}" "${source}")
  endif()
endfunction()
# For an executable of the training wing: LibTorch, where it is found at run time, and
# code that fits the precompiled header, which serves one setting of -fPIC and -fPIE.
function(echelon_use_torch target)
  target_link_libraries(${target} PRIVATE echelon::libtorch)
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE OFF
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};$ORIGIN/../${CMAKE_INSTALL_LIBDIR}/echelon/libtorch/lib")
  target_compile_options(${target} PRIVATE -fPIC)
endfunction()

# echelon_program(NAME echelon SOURCES main.cpp ... DEPENDS ... [TORCH])
function(echelon_program)
  cmake_parse_arguments(PROGRAM "TORCH" "NAME" "SOURCES;DEPENDS" ${ARGN})
  if(PROGRAM_TORCH AND NOT ECHELON_WITH_TORCH)
    return()
  endif()
  add_executable(${PROGRAM_NAME} ${PROGRAM_SOURCES})
  echelon_warnings(${PROGRAM_NAME})
  target_include_directories(${PROGRAM_NAME} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${PROGRAM_NAME} PRIVATE ${PROGRAM_DEPENDS})
  if(PROGRAM_TORCH)
    echelon_use_torch(${PROGRAM_NAME})
    echelon_torch_pch(${PROGRAM_NAME})
  endif()
  # The programs of the package live in echelon/; tests and examples stay here.
  file(RELATIVE_PATH folder
    "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  if(folder MATCHES "^echelon/")
    set_property(GLOBAL APPEND PROPERTY ECHELON_PROGRAMS ${PROGRAM_NAME})
  endif()
endfunction()
