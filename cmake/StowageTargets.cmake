# How every target of the project is compiled, and the two shapes that targets have: a layer of the
# core (one folder of src/) and a test program (one folder of tests/).
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# Unrolled copies of code that parses, plans and prints are an eighth of its bytes and no faster;
# what loops over values gets -O3.
string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

add_library(stowage_options INTERFACE)
target_include_directories(stowage_options INTERFACE ${PROJECT_SOURCE_DIR}/include
                                                     ${PROJECT_SOURCE_DIR}/src)
# No contraction: a fused multiply-add would make instruction sets disagree.
target_compile_options(stowage_options INTERFACE -ffp-contract=off -Wall -Wextra -Wconversion
                                                 -Wshadow -ffile-prefix-map=${PROJECT_SOURCE_DIR}=.)
# gcc 12 warns of overlap in `"text" + std::string` (gcc bug 105651, mended in 13).
target_compile_options(stowage_options INTERFACE
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)
if(STOWAGE_WERROR)
  target_compile_options(stowage_options INTERFACE -Werror)
endif()
add_library(stowage_test_options INTERFACE)  # linked after the others: the last option wins
add_library(stowage_text_options INTERFACE)  # so is this
if(STOWAGE_SANITIZE)
  # A null pointer, an object that is too small and a pointer that wraps around are what the address
  # sanitizer stops at; checks of their own cost a third of the time to compile the kernels.
  target_compile_options(stowage_options INTERFACE
    -fsanitize=${STOWAGE_SANITIZE} -fno-sanitize=null,object-size,pointer-overflow
    -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(stowage_options INTERFACE -fsanitize=${STOWAGE_SANITIZE})
  # Undefined behaviour is looked for in the code under test: in EXPECT lines that check doubles the
  # time to compile.
  target_compile_options(stowage_test_options INTERFACE -fno-sanitize=undefined)
  # Layers of text and trees make no pointers to values from bytes, so that none is misaligned:
  # a check at each use of a reference is a third of the time to compile the templates of JSON.
  target_compile_options(stowage_text_options INTERFACE -fno-sanitize=alignment)
else()
  # Tests are many templates and short loops: less optimising compiles them in half the time.
  target_compile_options(stowage_test_options INTERFACE -O1)
endif()

# A sanitized build compiles twice as fast without optimisation, but what loops over values would
# then take minutes to run.
function(stowage_optimise_loops target name)
  if(STOWAGE_SANITIZE AND name MATCHES "^(format|kernel|device)$")
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()

# The templates of nlohmann-json, CLI11, torch and GoogleTest cost more than our own lines: once for a
# few files, not for each. A build that joins none (-DSTOWAGE_JOIN=OFF, as the preset `dev` does)
# compiles each file alone and notices one that forgets an include. Files with flags of their own
# stay alone by themselves.
function(stowage_join target files)
  if(STOWAGE_JOIN)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${files})
    # It tells headers from sources by the file that the compiler was given.
    target_compile_options(${target} PRIVATE
      $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# stowage_layer(<name> <source>...): the objects of one folder of src/, target stowage_<name>.
function(stowage_layer name)
  if(NOT ARGN)
    return()
  endif()
  add_library(stowage_${name} OBJECT ${ARGN})
  target_link_libraries(stowage_${name} PRIVATE stowage_options)
  if(name MATCHES "^(store|plan|page|cli)$")
    target_link_libraries(stowage_${name} PRIVATE stowage_text_options)
  endif()
  if(NOT name STREQUAL kernel)  # whose files have names in common
    stowage_join(stowage_${name} 12)
  endif()
  if(name STREQUAL kernel)
    target_compile_options(stowage_${name} PRIVATE $<$<CONFIG:Release>:-O3>)
  endif()
  stowage_optimise_loops(stowage_${name} ${name})
endfunction()

# stowage_tests(<name> <source>...): one GoogleTest program over the whole core, internals included.
function(stowage_tests name)
  add_executable(${name}_tests ${ARGN})
  target_link_libraries(${name}_tests PRIVATE stowage_options stowage_static stowage_test_options
                                              GTest::gtest_main GTest::gmock)
  target_include_directories(${name}_tests PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  stowage_optimise_loops(${name}_tests ${name})
  stowage_join(${name}_tests 6)
  if(STOWAGE_SANITIZE MATCHES "address")
    # What checks say of their places are 600,000 pointers: moved once, and not in each process.
    target_link_options(${name}_tests PRIVATE -no-pie)
  endif()
  # GoogleTest's headers cost more than most tests do: compiled once for all programs of equal flags.
  get_target_property(flags ${name}_tests COMPILE_OPTIONS)
  get_property(first GLOBAL PROPERTY "stowage_headers_${flags}")
  if(first)
    target_precompile_headers(${name}_tests REUSE_FROM ${first})
  else()
    target_precompile_headers(${name}_tests PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
    set_property(GLOBAL PROPERTY "stowage_headers_${flags}" ${name}_tests)
  endif()
  gtest_discover_tests(${name}_tests DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${name})
endfunction()
