#----------------------------------------------------------------
# Generated CMake target import file for configuration "Release".
#----------------------------------------------------------------

# Commands may need to know the format version.
set(CMAKE_IMPORT_FILE_VERSION 1)

# Import target "stowage::stowage" for configuration "Release"
set_property(TARGET stowage::stowage APPEND PROPERTY IMPORTED_CONFIGURATIONS RELEASE)
set_target_properties(stowage::stowage PROPERTIES
  IMPORTED_LOCATION_RELEASE "${_IMPORT_PREFIX}/lib/libstowage.so"
  IMPORTED_SONAME_RELEASE "libstowage.so"
  )

list(APPEND _cmake_import_check_targets stowage::stowage )
list(APPEND _cmake_import_check_files_for_stowage::stowage "${_IMPORT_PREFIX}/lib/libstowage.so" )

# Commands beyond this point should not need to know the version.
set(CMAKE_IMPORT_FILE_VERSION)
