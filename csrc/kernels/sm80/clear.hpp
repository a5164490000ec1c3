// See clear.cu.
#pragma once

#include "kernels/sm80/launch.hpp"

namespace tpk::sm80 {

// One CTA; arguments: a pointer to 16-byte units, and an int, how many.
KernelInfo clear_kernel();

}  // namespace tpk::sm80
