// The worker threads. They sleep when idle, and come back after a fork: a child starts with no workers and makes its
// own when it needs them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace megasetup::cpu {

// What a worker does with its blocks. Widening is bound by the memory that all cores share, so a few are best; a core
// that only reads is bound by its own waiting, so reading takes more of them.
enum class Use { kConverting, kReading };

// Work that workers, as many as its use allows, may take blocks of in any order.
class Batch {
 public:
  // `run(block)` is called once for every block in [0, blocks); it must not throw.
  Batch(int64_t blocks, std::function<void(int64_t)> run) : blocks_(blocks), run_(std::move(run)) {}

  bool done() const { return finished_.load(std::memory_order_acquire) == blocks_; }

 private:
  friend class Pool;
  bool exhausted() const { return next_.load(std::memory_order_relaxed) >= blocks_; }
  // Takes blocks until none is left; true if this call finished the last one.
  bool work();

  const int64_t blocks_;
  const std::function<void(int64_t)> run_;
  int places_ = 0;  // for workers yet to come; guarded by the pool's mutex_
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> finished_{0};
};

class Pool {
 public:
  // The pool of this process.
  static Pool& instance();
  // Workers of a use: what set_num_threads or MEGASETUP_NUM_THREADS says; else, with each rank's share of the cores
  // this process may use, min(8, share) for converting, and for reading up to twice that, but one less than the share
  // or than the cores of set_cores, for the thread that waits. At least 1.
  int num_threads(Use use = Use::kConverting) const;
  // For both uses. Takes effect at the next submission, and in children forked later; throws std::invalid_argument
  // below 1.
  void set_num_threads(int threads);
  // Back to what holds when nothing was set.
  void use_default_threads();
  // Keep the workers on these cores (those of the GPU's NUMA node); ignored when this process may use none of them.
  void set_cores(const std::vector<int>& cores);

  void submit(const std::shared_ptr<Batch>& batch, Use use = Use::kConverting);
  // Submit and wait, asking `interrupted` now and then; a batch that is interrupted stops handing out blocks.
  // Returns false when it was interrupted. No block runs after this returns.
  bool run(int64_t blocks, const std::function<void(int64_t)>& run, const std::function<bool()>& interrupted,
           Use use = Use::kConverting);
  // Blocks not yet taken are given up. Afterwards wait until done() before freeing what the blocks use.
  static void cancel(Batch& batch);
  // Join the workers. The pool may be used again and starts new ones then.
  void shutdown();

 private:
  struct Worker {
    std::thread thread;
    bool leaving = false;  // guarded by mutex_
  };
  using Workers = std::vector<std::unique_ptr<Worker>>;

  void work(const Worker& self);
  // Wakes and joins workers that have been told to leave; called without mutex_.
  void dismiss(Workers surplus);
  // These are called with mutex_ held.
  void apply_cores(Worker& worker) const;
  void start_missing(int wanted);
  // The first batch with blocks and a place for one more worker, which is taken; null if there is none.
  std::shared_ptr<Batch> join_batch();
  Workers take_surplus(int keep);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Batch>> queue_;
  Workers workers_;
  std::vector<int> cores_;
  std::atomic<int> usable_cores_{0};  // how many those are; 0: not told
};

}  // namespace megasetup::cpu
