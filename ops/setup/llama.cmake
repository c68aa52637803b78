# Read by llama.cpp's CMake right after its project() call (CMAKE_PROJECT_llama.cpp_INCLUDE).
# llama-cpp-python forces LLAMA_BUILD_COMMON on; a worker needs neither it nor the tools
# behind it, and half of the build time goes there.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
