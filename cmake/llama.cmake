# llama.cpp, unmodified, as a static library inside our build tree: optimised in every preset, warnings off.
if(NOT EXISTS ${SEKV_LLAMA_DIR}/include/llama.h)
    message(FATAL_ERROR "SEKV_BUILD_LLAMA needs llama.cpp's sources, and SEKV_LLAMA_DIR=${SEKV_LLAMA_DIR} holds none. Run scripts/fetch_llama first, or point SEKV_LLAMA_DIR at them.")
endif()
if(SEKV_SANITIZE)
    message(FATAL_ERROR "SEKV_BUILD_LLAMA and SEKV_SANITIZE exclude each other: llama.cpp is not instrumented. Sanitize the library's own tests only.")
endif()

# llama.cpp compiles C too, and CMake wants a language enabled where all who link it are in scope.
enable_language(C)

# A function, so that these settings stay out of our own directories and cache.
function(sekv_add_llama)
    set(BUILD_SHARED_LIBS OFF)
    foreach(part BUILD_APP BUILD_COMMON BUILD_EXAMPLES BUILD_SERVER BUILD_TESTS BUILD_TOOLS BUILD_UI CURL OPENSSL)
        set(LLAMA_${part} OFF)
    endforeach()
    foreach(part CCACHE CPU_REPACK LLAMAFILE OPENMP)
        set(GGML_${part} OFF)
    endforeach()
    set(GGML_NATIVE ON)
    # It asks git for its commit; a fetched copy has none, and the answer would be ours or an alarming error.
    set(GIT_EXE /bin/false)
    set(GIT_EXECUTABLE /bin/false)
    foreach(language C CXX)
        set(CMAKE_${language}_FLAGS "${CMAKE_${language}_FLAGS} -w")
        foreach(config DEBUG RELEASE RELWITHDEBINFO MINSIZEREL)
            set(CMAKE_${language}_FLAGS_${config} "-O3 -DNDEBUG")
        endforeach()
    endforeach()
    add_subdirectory(${SEKV_LLAMA_DIR} ${PROJECT_BINARY_DIR}/llama.cpp EXCLUDE_FROM_ALL SYSTEM)
endfunction()
sekv_add_llama()
