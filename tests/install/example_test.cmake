# Installs the library into an empty prefix, moves the prefix, builds examples/cpp against it with
# find_package and with pkg-config, the latter in C too, and runs the programs: relocated, they print the same.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(failed)
    message(FATAL_ERROR "failed: ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})
run(${CMAKE_COMMAND} --install ${build} --component library --prefix ${work}/first)
file(RENAME ${work}/first ${work}/moved)
run(${model} ${work}/model.safetensors)

run(${CMAKE_COMMAND} -S ${source}/examples/cpp -B ${work}/example -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_CXX_COMPILER=${cxx} -DCMAKE_PREFIX_PATH=${work}/moved)
run(${CMAKE_COMMAND} --build ${work}/example)
run(${work}/example/multiply ${work}/model.safetensors layer.weight)
set(expected "${output}")
if(NOT expected MATCHES "^layer.weight: nf4:block64 \\[64, 128\\], 4608 bytes at rest\ny\\[0\\] = ")
  message(FATAL_ERROR "the example printed: ${expected}")
endif()

# Planned for a budget that holds it, and refused for one that does not, with the number that would do.
set(ENV{STOWAGE_LINKS} ${work}/links.json)
run(${work}/example/planned ${work}/model.safetensors 1000000)
if(NOT output MATCHES "^layer.weight: [|]W x[|] = [0-9.]+\n1 of 1 stay; predicted ")
  message(FATAL_ERROR "the planned example printed: ${output}")
endif()
execute_process(COMMAND ${work}/example/planned ${work}/model.safetensors 5000
                RESULT_VARIABLE code ERROR_VARIABLE output)
if(NOT code EQUAL 1 OR NOT output MATCHES "plan: ram must be at least [0-9]+ bytes")
  message(FATAL_ERROR "too small a budget gave ${code}: ${output}")
endif()

# Of no use to it, which it says by the name of what it misses.
execute_process(COMMAND ${work}/example/minilm ${work}/model.safetensors 1000000
                RESULT_VARIABLE code ERROR_VARIABLE output)
if(NOT code EQUAL 1 OR NOT output MATCHES "must have embeddings.word_embeddings.weight")
  message(FATAL_ERROR "a model that is no MiniLM gave ${code}: ${output}")
endif()

find_program(pkg_config NAMES pkg-config pkgconf)
if(pkg_config)
  set(ENV{PKG_CONFIG_PATH} ${work}/moved/lib/pkgconfig)
  run(${pkg_config} --cflags --libs stowage)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run(${cxx} ${source}/examples/cpp/multiply.cpp ${flags} -o ${work}/by_pkg_config)
  run(${work}/by_pkg_config ${work}/model.safetensors)
  if(NOT output STREQUAL expected)
    message(FATAL_ERROR "found by pkg-config it printed: ${output}")
  endif()
  run(${pkg_config} --cflags --libs stowage-c)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run(${cc} -std=c11 ${source}/tests/c/program.c ${flags} -lm -o ${work}/in_c)
  run(${work}/in_c ${work})
endif()
