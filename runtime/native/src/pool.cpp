#include "pool.h"

#include "signals.h"
#include "status.h"

#include <system_error>

namespace pi {
namespace {

// About 20 us: longer than the gap between two operations of a step, shorter than a scheduler's time slice.
constexpr int spin_rounds = 1000;
// About 2 ms more, for workers that are to stay awake.
constexpr int awake_rounds = 99 * spin_rounds;

// Waits until `value` is no longer `old`; returns what it became.
uint32_t wait_change(const std::atomic<uint32_t> &value, uint32_t old, const std::atomic<bool> &awake) {
    const auto has_changed = [&] { return value.load(std::memory_order_acquire) != old; };
    for (int i = 0; i < spin_rounds && !has_changed(); ++i)
        cpu_pause();
    spin_until(awake_rounds, [&] { return has_changed() || !awake.load(std::memory_order_relaxed); });
    value.wait(old, std::memory_order_acquire);
    return value.load(std::memory_order_acquire);
}

} // namespace

Pool::Pool(uint32_t n_threads) : done_(n_threads) {
    const BlockedSignals blocked;
    try {
        for (uint32_t thread = 1; thread < n_threads; ++thread)
            workers_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error &error) {
        const size_t started = workers_.size() + 1;
        stop();
        throw Error(PI_FAILURE,
                    "the system allows only " + std::to_string(started) + " of " + std::to_string(n_threads) +
                        " threads: " + error.what(),
                    "lower -t");
    }
}

Pool::~Pool() {
    stop();
}

void Pool::stop() {
    stopping_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread &worker : workers_)
        worker.join();
    workers_.clear();
}

void Pool::dispatch(int64_t n_chunks, Call task_call, const void *task) {
    call_ = task_call;
    task_ = task;
    n_chunks_ = n_chunks;
    next_chunk_.store(n_threads(), std::memory_order_relaxed);
    const uint32_t before = generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    drain(0);
    for (uint32_t thread = 1; thread < n_threads(); ++thread)
        wait_change(done_[thread].job, before, awake_);
}

void Pool::work(uint32_t thread) {
    for (uint32_t seen = 0;;) {
        seen = wait_change(generation_, seen, awake_);
        if (stopping_)
            return;
        drain(thread);
        done_[thread].job.store(seen, std::memory_order_release);
        done_[thread].job.notify_one();
    }
}

void Pool::drain(uint32_t thread) {
    for (int64_t chunk = thread; chunk < n_chunks_;) {
        call_(task_, chunk, thread);
        if (n_chunks_ <= n_threads())
            return;
        chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    }
}

} // namespace pi
