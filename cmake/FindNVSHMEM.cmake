# Finds NVSHMEM as setup.py does (find_nvshmem): TPK_NVSHMEM_HOME, of CMake or of the environment, else the package
# nvidia-nvshmem that torch depends on, else the usual places. The package has no libnvshmem_host.so and no files for
# CMake, hence this one.
#
#   NVSHMEM_FOUND, NVSHMEM_VERSION, NVSHMEM_INCLUDE_DIR, NVSHMEM_DEVICE_LIBRARY, NVSHMEM_HOST_LIBRARY
#   NVSHMEM::nvshmem   headers and both libraries; its users need CUDA_SEPARABLE_COMPILATION
set(_nvshmem_homes ${TPK_NVSHMEM_HOME} $ENV{TPK_NVSHMEM_HOME})
if(NOT _nvshmem_homes)
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(Python3_FOUND)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c
        "import importlib.util as u; print(*u.find_spec('nvidia.nvshmem').submodule_search_locations, sep=';')"
      OUTPUT_VARIABLE _nvshmem_homes OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  list(APPEND _nvshmem_homes /usr/local/nvshmem /opt/nvidia/nvshmem /opt/nvshmem)
endif()

find_path(NVSHMEM_INCLUDE_DIR non_abi/nvshmem_version.h PATHS ${_nvshmem_homes} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_file(NVSHMEM_DEVICE_LIBRARY libnvshmem_device.a PATHS ${_nvshmem_homes} PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH)
find_file(NVSHMEM_HOST_LIBRARY libnvshmem_host.so.3 PATHS ${_nvshmem_homes} PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH)
if(NVSHMEM_INCLUDE_DIR)
  set(NVSHMEM_VERSION "")
  foreach(_nvshmem_part MAJOR MINOR PATCH)
    file(STRINGS ${NVSHMEM_INCLUDE_DIR}/non_abi/nvshmem_version.h _nvshmem_line
      REGEX "define NVSHMEM_VENDOR_${_nvshmem_part}_VERSION")
    string(REGEX MATCH "[0-9]+$" _nvshmem_number "${_nvshmem_line}")
    list(APPEND NVSHMEM_VERSION ${_nvshmem_number})
  endforeach()
  list(JOIN NVSHMEM_VERSION "." NVSHMEM_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NVSHMEM
  REQUIRED_VARS NVSHMEM_HOST_LIBRARY NVSHMEM_DEVICE_LIBRARY NVSHMEM_INCLUDE_DIR
  VERSION_VAR NVSHMEM_VERSION)
mark_as_advanced(NVSHMEM_INCLUDE_DIR NVSHMEM_DEVICE_LIBRARY NVSHMEM_HOST_LIBRARY)

if(NVSHMEM_FOUND AND NOT TARGET NVSHMEM::nvshmem)
  add_library(NVSHMEM::nvshmem_host SHARED IMPORTED)
  set_target_properties(NVSHMEM::nvshmem_host PROPERTIES IMPORTED_LOCATION ${NVSHMEM_HOST_LIBRARY})
  add_library(NVSHMEM::nvshmem STATIC IMPORTED)
  set_target_properties(NVSHMEM::nvshmem PROPERTIES
    IMPORTED_LOCATION ${NVSHMEM_DEVICE_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${NVSHMEM_INCLUDE_DIR}
    IMPORTED_LINK_INTERFACE_LANGUAGES CUDA
    INTERFACE_LINK_LIBRARIES NVSHMEM::nvshmem_host)
endif()
