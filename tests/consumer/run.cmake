# Arguments: WAY SOURCE BUILD WORK GENERATOR CXX LAUNCHER CONFIG VERSION; see CMakeLists.txt beside this file.
cmake_minimum_required(VERSION 3.25)

function(step)
    execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    message("${output}")
    if(NOT result EQUAL 0)
        list(JOIN ARGV " " command)
        message(FATAL_ERROR "Failed (${result}): ${command}")
    endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
set(options -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_BUILD_TYPE=${CONFIG})
if(WAY MATCHES "^find_package")
    step(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/prefix)
    # What is compiled into the library must not be asked of those who link it.
    list(APPEND options -Dsekv_ROOT=${WORK}/prefix -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
else()
    list(APPEND options -DSEKV_SOURCE=${SOURCE})
endif()
step(${CMAKE_COMMAND} -S ${SOURCE}/tests/consumer/${WAY} -B ${WORK}/build -G ${GENERATOR} ${options})
step(${CMAKE_COMMAND} --build ${WORK}/build --config ${CONFIG} --parallel 2)
step(${CMAKE_COMMAND} --build ${WORK}/build --config ${CONFIG} --target run_consumer)
