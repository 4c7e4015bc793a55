#include "cpu/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace megasetup::cpu {
namespace {

// How often a waiting caller looks for Ctrl-C.
constexpr auto kInterruptPeriod = std::chrono::milliseconds(20);

// More workers than any host has cores would only exhaust the system's threads.
constexpr int kMostThreads = 1024;

// The number that a variable holds, at most kMostThreads; 0 when it is unset or holds no positive number.
int positive_from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return end == text || value < 1 ? 0 : static_cast<int>(std::min<long>(value, kMostThreads));
}

// Ranks of this host, as torchrun, Slurm, Open MPI and MPICH say it; 1 when none does.
int local_ranks() {
  for (const char* name :
       {"LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    if (const int ranks = positive_from_environment(name)) return ranks;
  }
  return 1;
}

// What set_num_threads asked for, 0 for the default. Kept outside the pool: a forked child has another pool, but the
// same setting.
std::atomic<int>& wanted_threads() {
  static std::atomic<int> threads{0};
  return threads;
}

struct DefaultThreads {
  DefaultThreads() {
    converting = reading = positive_from_environment("MEGASETUP_NUM_THREADS");
    if (converting > 0) return;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    const int cores = sched_getaffinity(0, sizeof(allowed), &allowed) == 0
                          ? CPU_COUNT(&allowed)
                          : static_cast<int>(std::thread::hardware_concurrency());
    const int share = cores / local_ranks();
    converting = std::max(1, std::min(8, share));
    reading = std::max(converting, std::min(2 * converting, share - 1));
  }
  int converting;
  int reading;
};

std::atomic<Pool*>& current_pool() {
  static std::atomic<Pool*> pool{nullptr};
  return pool;
}

// The parent's workers do not exist in a child, and its lock may be held by one of them: the child abandons the pool.
void forget_pool_in_child() { current_pool().store(nullptr); }

}  // namespace

bool Batch::work() {
  int64_t taken = 0;
  for (int64_t block; (block = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_; ++taken) run_(block);
  return taken > 0 && finished_.fetch_add(taken, std::memory_order_acq_rel) + taken == blocks_;
}

Pool& Pool::instance() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  Pool* pool = current_pool().load(std::memory_order_acquire);
  if (pool == nullptr) {
    auto fresh = std::make_unique<Pool>();
    if (current_pool().compare_exchange_strong(pool, fresh.get())) pool = fresh.release();
  }
  return *pool;
}

int Pool::num_threads(Use use) const {
  // Asked of the system once: this is called for every chunk.
  static const DefaultThreads by_default;
  const int wanted = wanted_threads().load();
  if (wanted > 0) return wanted;
  if (use == Use::kConverting) return by_default.converting;
  const int cores = usable_cores_.load();
  return cores == 0 ? by_default.reading : std::max(by_default.converting, std::min(by_default.reading, cores - 1));
}

void Pool::use_default_threads() {
  Workers surplus;
  {
    const std::lock_guard lock(mutex_);
    wanted_threads().store(0);
    surplus = take_surplus(num_threads(Use::kReading));
  }
  dismiss(std::move(surplus));
}

void Pool::set_num_threads(int threads) {
  if (threads < 1 || threads > kMostThreads) {
    throw std::invalid_argument("num_threads is " + std::to_string(threads) + ": it must be from 1 to " +
                                std::to_string(kMostThreads));
  }
  Workers surplus;
  {
    const std::lock_guard lock(mutex_);
    wanted_threads().store(threads);
    surplus = take_surplus(threads);
  }
  dismiss(std::move(surplus));
}

void Pool::set_cores(const std::vector<int>& cores) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  std::vector<int> usable;
  for (const int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &allowed)) usable.push_back(core);
  }
  if (usable.empty()) return;
  const std::lock_guard lock(mutex_);
  if (usable == cores_) return;
  cores_ = std::move(usable);
  usable_cores_.store(static_cast<int>(cores_.size()));
  for (const auto& worker : workers_) apply_cores(*worker);
}

void Pool::apply_cores(Worker& worker) const {
  if (cores_.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores_) CPU_SET(core, &set);
  // A refusal costs speed, not correctness.
  (void)pthread_setaffinity_np(worker.thread.native_handle(), sizeof(set), &set);
}

void Pool::start_missing(int wanted) {
  while (workers_.size() < static_cast<size_t>(wanted)) {
    auto worker = std::make_unique<Worker>();
    worker->thread = std::thread(&Pool::work, this, std::cref(*worker));
    workers_.push_back(std::move(worker));
    apply_cores(*workers_.back());
  }
}

Pool::Workers Pool::take_surplus(int keep) {
  Workers surplus;
  while (workers_.size() > static_cast<size_t>(keep)) {
    workers_.back()->leaving = true;
    surplus.push_back(std::move(workers_.back()));
    workers_.pop_back();
  }
  return surplus;
}

void Pool::dismiss(Workers surplus) {
  wake_.notify_all();
  for (const auto& worker : surplus) worker->thread.join();
}

void Pool::shutdown() {
  Workers surplus;
  {
    const std::lock_guard lock(mutex_);
    surplus = take_surplus(0);
  }
  dismiss(std::move(surplus));
}

void Pool::submit(const std::shared_ptr<Batch>& batch, Use use) {
  {
    const std::lock_guard lock(mutex_);
    batch->places_ = num_threads(use);
    start_missing(batch->places_);
    queue_.push_back(batch);
  }
  wake_.notify_all();
}

bool Pool::run(int64_t blocks, const std::function<void(int64_t)>& run, const std::function<bool()>& interrupted,
               Use use) {
  const auto batch = std::make_shared<Batch>(blocks, run);
  submit(batch, use);
  bool cancelled = false;
  std::unique_lock lock(mutex_);
  while (!finished_.wait_for(lock, kInterruptPeriod, [&] { return batch->done(); })) {
    lock.unlock();
    if (!cancelled && interrupted()) {
      cancelled = true;
      cancel(*batch);
    }
    lock.lock();
  }
  return !cancelled;
}

void Pool::cancel(Batch& batch) {
  // Blocks not yet taken count as finished, so that done() means: nothing runs any more.
  const int64_t taken = std::min(batch.next_.exchange(batch.blocks_, std::memory_order_acq_rel), batch.blocks_);
  batch.finished_.fetch_add(batch.blocks_ - taken, std::memory_order_acq_rel);
}

std::shared_ptr<Batch> Pool::join_batch() {
  std::erase_if(queue_, [](const auto& batch) { return batch->exhausted(); });
  const auto found = std::find_if(queue_.begin(), queue_.end(), [](const auto& batch) { return batch->places_ > 0; });
  if (found == queue_.end()) return nullptr;
  --(*found)->places_;
  return *found;
}

void Pool::work(const Worker& self) {
  std::unique_lock lock(mutex_);
  while (!self.leaving) {
    if (const std::shared_ptr<Batch> batch = join_batch()) {
      lock.unlock();
      const bool last = batch->work();
      lock.lock();
      if (last) finished_.notify_all();
      continue;
    }
    wake_.wait(lock);
  }
}

}  // namespace megasetup::cpu
