# cmake -DCXX=COMPILER -DINCLUDE=DIR -DCASE=FILE -P check.cmake
# A case holds a use that must be refused and, under SEKV_EXPECT_OK, the nearest use that is fine. It passes when the
# second compiles and the first doesn't, and the compiler's words hold every phrase that a line `// expect: PHRASE` names:
# a case that fails for a reason of its own (a typing slip, a renamed header) goes red.
cmake_minimum_required(VERSION 3.25)

set(ENV{LC_ALL} C)
set(compile ${CXX} -std=c++20 -fsyntax-only -I${INCLUDE})

file(STRINGS ${CASE} expected REGEX "^// expect: .")
if(NOT expected)
    message(FATAL_ERROR "${CASE} has no line '// expect: PHRASE'.")
endif()

execute_process(COMMAND ${compile} -DSEKV_EXPECT_OK ${CASE} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${CASE} must compile with -DSEKV_EXPECT_OK, but:\n${output}")
endif()

execute_process(COMMAND ${compile} ${CASE} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
    message(FATAL_ERROR "${CASE} compiles, but must be refused.")
endif()
foreach(line IN LISTS expected)
    string(REGEX REPLACE "^// expect: " "" phrase "${line}")
    string(FIND "${output}" "${phrase}" at)
    if(at EQUAL -1)
        message(FATAL_ERROR "${CASE} is refused, but not in the words '${phrase}':\n${output}")
    endif()
endforeach()
