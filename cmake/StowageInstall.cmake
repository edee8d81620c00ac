# What an installed Stowage is: headers, libstowage.so, a CMake package and pkg-config files, all
# found from where they lie, so that a wheel can be unpacked anywhere.
include(CMakePackageConfigHelpers)
set(lib lib)  # fixed: a wheel and the paths in stowage.pc know no lib64
set(package ${lib}/cmake/stowage)

install(TARGETS stowage EXPORT stowage_targets LIBRARY DESTINATION ${lib} COMPONENT library)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION include COMPONENT library
        FILES_MATCHING PATTERN "*.h")
install(EXPORT stowage_targets FILE stowageTargets.cmake NAMESPACE stowage:: DESTINATION ${package}
        COMPONENT library)

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/stowageConfig.cmake.in ${PROJECT_BINARY_DIR}/stowageConfig.cmake
  INSTALL_DESTINATION ${package} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the C++ interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/stowageConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/stowageConfig.cmake
              ${PROJECT_BINARY_DIR}/stowageConfigVersion.cmake
        DESTINATION ${package} COMPONENT library)

foreach(pc stowage stowage-c)  # for C++, and for C, which knows no -std=c++20
  configure_file(${CMAKE_CURRENT_LIST_DIR}/${pc}.pc.in ${PROJECT_BINARY_DIR}/${pc}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${pc}.pc DESTINATION ${lib}/pkgconfig COMPONENT library)
endforeach()
