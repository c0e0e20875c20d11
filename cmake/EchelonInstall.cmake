# cmake --install: programs, static libraries, headers, and a CMake package:
#
#   find_package(Echelon REQUIRED)            # or COMPONENTS plain: no LibTorch
#   target_link_libraries(mine PRIVATE Echelon::echelon)
#
# Echelon::echelon is the training wing and all it needs; Echelon::plain is the
# wing without LibTorch; every room has a target of its own (Echelon::layout).
# Echelon::plugin is for a library of [model] library, which takes Echelon's
# functions from the program that loads it; echelon_precompile(TARGET) gives a
# target the precompiled headers (cmake/EchelonConfig.cmake.in).
include(CMakePackageConfigHelpers)

get_property(_rooms GLOBAL PROPERTY ECHELON_ROOMS)
get_property(_torch_rooms GLOBAL PROPERTY ECHELON_TORCH_ROOMS)
get_property(_programs GLOBAL PROPERTY ECHELON_PROGRAMS)
get_property(_modules GLOBAL PROPERTY ECHELON_MODULES)
get_property(ECHELON_PACKAGES GLOBAL PROPERTY ECHELON_PACKAGES)
list(REMOVE_DUPLICATES ECHELON_PACKAGES)
set(_plain_rooms ${_rooms})
list(REMOVE_ITEM _plain_rooms ${_torch_rooms})

add_library(echelon_plain INTERFACE)
add_library(echelon::plain ALIAS echelon_plain)
set_target_properties(echelon_plain PROPERTIES EXPORT_NAME plain)
target_link_libraries(echelon_plain INTERFACE ${_plain_rooms})

set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/Echelon")
install(TARGETS ${_plain_rooms} echelon_plain
  EXPORT EchelonPlainTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT EchelonPlainTargets
  NAMESPACE Echelon:: DESTINATION "${_package}")

if(ECHELON_WITH_TORCH)
  add_library(echelon_all INTERFACE)
  add_library(echelon::echelon ALIAS echelon_all)
  set_target_properties(echelon_all PROPERTIES EXPORT_NAME echelon)
  target_link_libraries(echelon_all INTERFACE ${_torch_rooms} echelon_plain)
  install(TARGETS ${_torch_rooms} echelon_all echelon_libtorch
    EXPORT EchelonTargets
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  install(EXPORT EchelonTargets
    NAMESPACE Echelon:: DESTINATION "${_package}")
  # The programs and the CMake package look for LibTorch there.
  install(CODE "
    set(_link \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/echelon/libtorch\")
    file(REMOVE \"\${_link}\")
    file(MAKE_DIRECTORY \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/echelon\")
    file(CREATE_LINK \"${ECHELON_LIBTORCH}\" \"\${_link}\" SYMBOLIC)")
endif()

if(_programs)
  install(TARGETS ${_programs}
    RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
if(_modules)
  install(TARGETS ${_modules}
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/EchelonConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/EchelonConfig.cmake"
  INSTALL_DESTINATION "${_package}"
  PATH_VARS CMAKE_INSTALL_BINDIR CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/EchelonConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/EchelonConfig.cmake"
  "${PROJECT_BINARY_DIR}/EchelonConfigVersion.cmake"
  DESTINATION "${_package}")
