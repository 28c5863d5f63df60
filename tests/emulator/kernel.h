// Modules and kernels: any image loads, and its functions are the test kernels written for the host.
//
// The kernels are those of tests/kernels/test_kernels.cu, which documents them, found by name. Before touching memory a
// kernel checks that its ranges lie in live blocks its context may access; if not, the context gets the sticky error
// 700, as on the real device.
#pragma once

#include "context.h"

namespace emu {

struct Module {
  std::shared_ptr<Context> context;
};

// Makes the work of one launch from the launch's arguments, which are copied.
using Kernel = Work (*)(const ContextPtr& context, void** arguments);

}  // namespace emu
