#include "cpu/feed.h"

#include <sched.h>

#include "cpu/kernels.h"
#include "cpu/spin.h"

namespace megasetup::cpu {

Feed::Feed(size_t most_jobs, Use use) : jobs_(std::make_unique<Job[]>(most_jobs)) {
  (void)kernels();  // a wrong MEGASETUP_CPU_ISA is the caller's error, not a worker's
  Pool& pool = Pool::instance();
  stays_ = std::make_shared<Batch>(pool.num_threads(use), [this](int64_t) { work(); });
  pool.submit(stays_, use);
}

Feed::~Feed() {
  closed_.store(true, std::memory_order_release);
  Pool::cancel(*stays_);
  while (!stays_->done()) sched_yield();
}

const Feed::Job& Feed::publish(int64_t blocks, std::function<void(int64_t)> run) {
  const size_t index = published_.load(std::memory_order_relaxed);
  Job& job = jobs_[index];
  job.blocks_ = blocks;
  job.run_ = std::move(run);
  published_.store(index + 1, std::memory_order_release);
  return job;
}

void Feed::work() {
  Spin spin;
  for (size_t index = 0; !closed_.load(std::memory_order_acquire);) {
    if (index == published_.load(std::memory_order_acquire)) {
      spin.once();
      continue;
    }
    Job& job = jobs_[index++];
    int64_t taken = 0;
    while (!closed_.load(std::memory_order_relaxed)) {
      const int64_t block = job.next_.fetch_add(1, std::memory_order_relaxed);
      if (block >= job.blocks_) break;
      job.run_(block);
      ++taken;
    }
    if (taken > 0) job.finished_.fetch_add(taken, std::memory_order_acq_rel);
  }
}

}  // namespace megasetup::cpu
