// pool.h: one persistent team of threads. Every thread has its first chunk of work by its number, so that
// short jobs begin and end without a line of memory that all threads write; the others come from a shared
// counter, so that fast and slow cores both stay busy. Idle workers spin for a moment and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pi {

// In a loop that waits for another thread or device.
inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Looks up to `rounds` times, of some 20 ns, whether done() holds, before a thread that asks goes to sleep;
// others may have the core meanwhile.
template <typename Done>
void spin_until(int rounds, const Done &done) {
    constexpr int rounds_between_yields = 64;
    for (int i = 1; i <= rounds && !done(); ++i) {
        if (i % rounds_between_yields == 0)
            std::this_thread::yield();
        cpu_pause();
    }
}

class Pool {
  public:
    // The caller of run() is one of the n_threads. Throws Error when the system refuses a thread.
    explicit Pool(uint32_t n_threads);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    uint32_t n_threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

    // Between jobs the workers stay awake for milliseconds, since waking them takes as long as a small job:
    // for work that comes in short intervals from somewhere else.
    void stay_awake(bool on) { awake_.store(on, std::memory_order_relaxed); }

    // Calls task(chunk, thread) for every chunk in [0, n_chunks), each once; returns when all are done.
    // Chunks below n_threads() are those threads'. The task must not throw. Not reentrant.
    template <typename Task>
    void run(int64_t n_chunks, const Task &task) {
        if (n_chunks <= 1 || workers_.empty()) {
            for (int64_t chunk = 0; chunk < n_chunks; ++chunk)
                task(chunk, 0u);
            return;
        }
        dispatch(n_chunks, &call<Task>, &task);
    }

  private:
    // The last job that a worker has done, as generation_ counts them; a cache line each.
    struct alignas(64) Done {
        std::atomic<uint32_t> job{0};
    };
    using Call = void (*)(const void *task, int64_t chunk, uint32_t thread);

    template <typename Task>
    static void call(const void *task, int64_t chunk, uint32_t thread) {
        (*static_cast<const Task *>(task))(chunk, thread);
    }
    void dispatch(int64_t n_chunks, Call task_call, const void *task);
    void work(uint32_t thread);
    void drain(uint32_t thread);
    void stop();

    std::vector<std::thread> workers_;
    std::vector<Done> done_; // [n_threads] the caller's is not used
    Call call_ = nullptr;
    const void *task_ = nullptr;
    int64_t n_chunks_ = 0;
    bool stopping_ = false;
    std::atomic<bool> awake_{false};
    alignas(64) std::atomic<int64_t> next_chunk_{0};
    alignas(64) std::atomic<uint32_t> generation_{0}; // raised once for every job
};

} // namespace pi
