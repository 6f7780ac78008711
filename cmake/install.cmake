# `cmake --install`, and what find_package(sekv [COMPONENTS cuda]) reads afterwards.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(sekv_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sekv)
install(TARGETS sekv EXPORT sekvTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT sekvTargets NAMESPACE sekv:: DESTINATION ${sekv_package_dir})
if(SEKV_CUDA)
    install(TARGETS sekv_cuda EXPORT sekvCudaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(EXPORT sekvCudaTargets NAMESPACE sekv:: DESTINATION ${sekv_package_dir})
endif()

configure_package_config_file(cmake/sekvConfig.cmake.in ${PROJECT_BINARY_DIR}/sekvConfig.cmake INSTALL_DESTINATION ${sekv_package_dir})
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sekvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sekvConfig.cmake ${PROJECT_BINARY_DIR}/sekvConfigVersion.cmake DESTINATION ${sekv_package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
