#include "transfer/arena.h"

#include <cctype>
#include <fstream>
#include <sstream>
#include <string>

#include "cpu/pool.h"
#include "gpu/cuda.h"

namespace megasetup::transfer {

PinnedMemory::PinnedMemory(size_t bytes, int device) : cpu::HostMemory(bytes), device_(device) {
  cpu::Pool::instance().set_cores(cores_near(device));
}

PinnedMemory::~PinnedMemory() {
  if (!pinned_ || !mine()) return;
  // Errors are of no use here: at the end of the process CUDA may be gone already, and the pins with it.
  int previous = 0;
  if (cudaGetDevice(&previous) == cudaSuccess && cudaSetDevice(device_) == cudaSuccess) {
    (void)cudaDeviceSynchronize();
    (void)cudaSetDevice(previous);
  }
  (void)cudaHostUnregister(data());
  (void)cudaGetLastError();
}

void PinnedMemory::pin() {
  if (pinned_) return;
  const gpu::DeviceGuard guard(device_);
  keep_from_children();
  const cudaError_t status = cudaHostRegister(data(), size(), cudaHostRegisterPortable);
  if (status != cudaSuccess) give_to_children();
  gpu::check(status, ("pinning " + std::to_string(size()) + " bytes of host memory").c_str());
  pinned_ = true;
}

std::vector<int> cores_near(int device) {
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof(bus), device) != cudaSuccess) {
    (void)cudaGetLastError();  // so that the next launch does not report this one
    return {};
  }
  for (char& c : bus) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::ifstream file("/sys/bus/pci/devices/" + std::string(bus) + "/local_cpulist");
  std::vector<int> cores;
  // The form is "0-7,16-23".
  for (std::string range; std::getline(file, range, ',');) {
    std::istringstream text(range);
    int first = 0, last = 0;
    char dash = 0;
    if (!(text >> first)) continue;
    if (!(text >> dash >> last)) last = first;
    for (int core = first; core <= last; ++core) cores.push_back(core);
  }
  return cores;
}

}  // namespace megasetup::transfer
