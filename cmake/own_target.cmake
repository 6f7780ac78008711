# sekv_own_target(TARGET [UNINSTRUMENTED]): the dialect, warnings and sanitizers of code written here. Dependencies come in
# as imported or SYSTEM targets, so that their headers don't warn. UNINSTRUMENTED: linked with the sanitizers, but without
# TSan's instrumentation (the emulation's scheduler annotates what it does itself).
function(sekv_own_target target)
    cmake_parse_arguments(own "UNINSTRUMENTED" "" "" ${ARGN})
    set(cxx "$<$<COMPILE_LANGUAGE:CXX>:")
    set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
    target_compile_options(${target} PRIVATE "${cxx}-Wall;-Wextra;-Wconversion>" "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        target_compile_options(${target} PRIVATE "${cxx}-Wno-restrict>")  # GCC bug 105651: "text" + std::string warns inside libstdc++
    endif()
    if(SEKV_WERROR)
        target_compile_options(${target} PRIVATE "${cxx}-Werror>" "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings -Xcompiler=-Werror>")
    endif()
    if(SEKV_SANITIZE)
        list(JOIN SEKV_SANITIZE "," kinds)
        if(NOT (own_UNINSTRUMENTED AND "thread" IN_LIST SEKV_SANITIZE))
            target_compile_options(${target} PRIVATE -fsanitize=${kinds} -fno-sanitize-recover=all -fno-omit-frame-pointer)
        endif()
        # PUBLIC: whoever links an instrumented static library needs the runtime too.
        target_link_options(${target} PUBLIC -fsanitize=${kinds})
    endif()
endfunction()
