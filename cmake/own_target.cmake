# sekv_own_target(TARGET): the dialect, warnings and sanitizers of code written here. Dependencies come in as imported
# or SYSTEM targets, so that their headers don't warn.
function(sekv_own_target target)
    set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
    target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        target_compile_options(${target} PRIVATE -Wno-restrict)  # GCC bug 105651: "text" + std::string warns inside libstdc++
    endif()
    if(SEKV_WERROR)
        target_compile_options(${target} PRIVATE -Werror)
    endif()
    if(SEKV_SANITIZE)
        list(JOIN SEKV_SANITIZE "," kinds)
        target_compile_options(${target} PRIVATE -fsanitize=${kinds} -fno-sanitize-recover=all -fno-omit-frame-pointer)
        # PUBLIC: whoever links an instrumented static library needs the runtime too.
        target_link_options(${target} PUBLIC -fsanitize=${kinds})
    endif()
endfunction()
