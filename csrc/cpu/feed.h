// Work that arrives bit by bit, for workers that stay with it: a chunk of a pipeline comes every hundred microseconds,
// and taking each from the pool's queue would cost every worker a lock a chunk, and the pipeline half its rate. The
// jobs of a feed stand in one array that is never reused, so that its workers need atomic counters and nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "cpu/pool.h"

namespace megasetup::cpu {

class Feed {
 public:
  class Job {
   public:
    bool done() const { return finished_.load(std::memory_order_acquire) == blocks_; }

   private:
    friend class Feed;
    int64_t blocks_ = 0;
    std::function<void(int64_t)> run_;
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> finished_{0};
  };

  // Takes the workers of this process's pool as they become free, for at most `most_jobs` jobs.
  explicit Feed(size_t most_jobs, Use use = Use::kConverting);
  // Jobs that are not done are given up. When this returns, none is running.
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  // `run(block)` will be called once for every block in [0, blocks); it must not throw. Called by one thread.
  const Job& publish(int64_t blocks, std::function<void(int64_t)> run);

 private:
  // One worker's stay.
  void work();

  const std::unique_ptr<Job[]> jobs_;
  std::atomic<size_t> published_{0};
  std::atomic<bool> closed_{false};
  std::shared_ptr<Batch> stays_;
};

}  // namespace megasetup::cpu
