# Writes HEADER with the text of PTX (empty where there is none) as the string kTestKernels.
set(image "")
if(PTX)
  file(READ ${PTX} image)
endif()
file(WRITE ${HEADER} "// Generated from test_kernels.cu.\n#pragma once\n\n"
  "inline constexpr char kTestKernels[] = R\"PTX(${image})PTX\";\n")
