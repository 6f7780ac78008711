# Settings that are ours to choose only when sekv is the project being built, not part of another.
get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT CMAKE_BUILD_TYPE AND NOT multi_config)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(SEKV_CCACHE ccache)
if(SEKV_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_C_COMPILER_LAUNCHER ${SEKV_CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${SEKV_CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${SEKV_CCACHE})
endif()
