# The kernel as a part of a library: for CUDA devices, or, for checks, for the host. Included at the top level of a
# project without languages; asks for the compilers that there is something to compile for.
#
#   TORCHREC_KT_CUDA  AUTO: where there is a CUDA compiler; ON: fail without one; OFF
#   TORCHREC_KT_HOST  build the kernel for the host, with sanitizers, for checks
#   CMAKE_CUDA_ARCHITECTURES  default: all of 80, 86, 89, 90, 100, 120 that the compiler knows, and PTX
#
# Sets TORCHREC_KT_WITH_CUDA.
set_property(CACHE TORCHREC_KT_CUDA PROPERTY STRINGS AUTO ON OFF)
option(TORCHREC_KT_HOST "Build the kernel for the host, for checks" OFF)
set(TORCHREC_KT_SANITIZE address,undefined CACHE STRING "Sanitizers of the host build; empty for none")
set(TORCHREC_KT_SOURCES ${CMAKE_CURRENT_LIST_DIR})

if(TORCHREC_KT_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  set(TORCHREC_KT_WITH_CUDA ${CMAKE_CUDA_COMPILER})
else()
  set(TORCHREC_KT_WITH_CUDA ${TORCHREC_KT_CUDA})
endif()

if(TORCHREC_KT_WITH_CUDA OR TORCHREC_KT_HOST)
  enable_language(CXX)
endif()
if(TORCHREC_KT_WITH_CUDA)
  # Set before the language is enabled, which would choose a single one. A first guess, narrowed below.
  set(given_architectures ${CMAKE_CUDA_ARCHITECTURES})
  if(NOT given_architectures)
    set(CMAKE_CUDA_ARCHITECTURES OFF)
  endif()
  enable_language(CUDA)
  if(NOT given_architectures)
    execute_process(
      COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known RESULT_VARIABLE status)
    if(status)
      message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} --list-gpu-arch failed; set CMAKE_CUDA_ARCHITECTURES")
    endif()
    set(architectures)
    foreach(number 80 86 89 90 100 120)
      if(known MATCHES "compute_${number}[^0-9]")
        list(APPEND architectures ${number}-real)
        set(newest ${number})
      endif()
    endforeach()
    set(given_architectures ${architectures} ${newest}-virtual)
  endif()
  message(STATUS "CUDA library for architectures ${given_architectures}")
endif()

function(add_kernel target)
  target_sources(${target} PRIVATE ${TORCHREC_KT_SOURCES}/apply.cpp ${ARGN})
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden SKIP_BUILD_RPATH ON)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)
  target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()

function(add_cuda_kernel target)
  add_kernel(${target} ${TORCHREC_KT_SOURCES}/cuda.cu)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CUDA_ARCHITECTURES "${given_architectures}"
    CUDA_RUNTIME_LIBRARY Static)
  # Registers, spills and stack of every kernel go to the build's log, which the tests read.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--threads=0;-Xptxas=-v>)
endfunction()

function(add_host_kernel target)
  add_kernel(${target} ${TORCHREC_KT_SOURCES}/host.cpp)
  # Rows beyond the last are neither loaded nor stored, which the compiler does not see.
  target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
  if(TORCHREC_KT_SANITIZE)
    set(flags -O1 -g -fsanitize=${TORCHREC_KT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_options(${target} PRIVATE ${flags})
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()
