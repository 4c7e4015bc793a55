// Chooses the CPU kernels at run time, once, by what the processor has.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/kernels.h"

namespace megasetup::cpu {
namespace {

// Best first.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&avx512_kernels());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) tables.push_back(&avx2_kernels());
#elif defined(__aarch64__)
  tables.push_back(&neon_kernels());
#endif
  tables.push_back(&scalar_kernels());
  return tables;
}

const Kernels& find(const std::string& name) {
  std::string known;
  for (const Kernels* table : usable()) {
    if (name == table->name) return *table;
    known += std::string(known.empty() ? "" : ", ") + table->name;
  }
  throw std::invalid_argument("CPU kernels '" + name + "' cannot run here: this processor runs " + known +
                              " (see MEGASETUP_CPU_ISA)");
}

const Kernels* initial() {
  const char* wanted = std::getenv("MEGASETUP_CPU_ISA");
  return wanted != nullptr && *wanted != '\0' ? &find(wanted) : usable().front();
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{initial()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

void set_kernels(const std::string& name) { current().store(&find(name), std::memory_order_relaxed); }

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernels* table : usable()) names.emplace_back(table->name);
  return names;
}

}  // namespace megasetup::cpu
