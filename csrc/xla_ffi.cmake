# eformer_xla_ffi: the headers of XLA's foreign function interface, which come with jaxlib.
#
# A library works with the jaxlib whose headers it was built with and with newer ones, not with older ones. Hence
# pyproject.toml asks for the oldest jaxlib that eformer supports when a wheel is built.
set(EFORMER_FFI_INCLUDE "" CACHE PATH "Folder of xla/ffi/api/ffi.h; empty: that of the jaxlib Python finds")

set(found "${EFORMER_FFI_INCLUDE}")
if(NOT found)
  # The Python of the build (scikit-build-core, -DPython_EXECUTABLE=...), else the repository's own, else any.
  foreach(python "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/.venv/bin/python" python3)
    if(python AND NOT found)
      execute_process(
        COMMAND "${python}" -c "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0] + '/include')"
        OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endforeach()
endif()
if(NOT EXISTS "${found}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "eformer: the native kernels need the headers of XLA's FFI (xla/ffi/api/ffi.h), which come with jaxlib. "
    "Install jaxlib for the Python that builds (-DPython_EXECUTABLE=...), name their folder (-DEFORMER_FFI_INCLUDE=...), "
    "or leave native code out (-DEFORMER_NATIVE=OFF).")
endif()
message(STATUS "eformer: headers of XLA's FFI from ${found}")

# A build in isolation finds jaxlib in another folder each time. Copied, the headers keep their place and their dates, and
# nothing is compiled again.
set(api xla/ffi/api)
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/include/${api}")
file(GLOB headers RELATIVE "${found}" "${found}/${api}/*.h")
foreach(header ${headers})
  file(COPY_FILE "${found}/${header}" "${PROJECT_BINARY_DIR}/include/${header}" ONLY_IF_DIFFERENT)
endforeach()
add_library(eformer_xla_ffi INTERFACE)
target_include_directories(eformer_xla_ffi SYSTEM INTERFACE "${PROJECT_BINARY_DIR}/include")
