// megasetup._C, as a table of contents. Each concern registers itself.
#include "python.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels and transfers of megasetup, on addresses; megasetup.kernels is their face on tensors";
  megasetup::register_cpu(module);
#ifdef MEGASETUP_CUDA
  module.attr("gpu_architectures") = MEGASETUP_ARCHITECTURES;
  megasetup::register_gpu(module);
  megasetup::register_transfer(module);
#else
  module.attr("gpu_architectures") = "";
  module.def("gpu_problem", [] {
    return "this build has no GPU half: nvcc was not found when it was built; install the CUDA toolkit (or set "
           "CUDACXX) "
           "and build megasetup again";
  });
#endif
}
