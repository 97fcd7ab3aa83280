// engine.h: a model under a plan: the backend's stream, buffers and KV cache, and the thread that runs one
// step at a time while the caller does something else.
#pragma once

#include "forward.h"
#include "layer_times.h"

#include <condition_variable>
#include <memory>
#include <mutex>

struct pi_engine {
    // Throws pi::Error when the plan cannot be executed as it stands.
    pi_engine(const pi_model &model, const pi_plan &plan);
    ~pi_engine();
    pi_engine(const pi_engine &) = delete;
    pi_engine &operator=(const pi_engine &) = delete;

    uint64_t submit(const pi_batch &batch);
    // False when the time ran out first. Throws the step's failure.
    bool wait(uint64_t ticket, uint32_t timeout_ms);
    void abort() { abort_requested_ = true; }
    void set_abort(pi_abort_fn callback, void *user);

    // The cache and the results belong to the caller between steps: what needs them is called with them while
    // no step can begin; throws pi::Error while one runs.
    template <typename Function>
    auto with_cache(const Function &function) {
        const auto lock = lock_idle();
        return function(cache_);
    }
    template <typename Function>
    auto with_cache(const Function &function) const {
        const auto lock = lock_idle();
        return function(cache_);
    }
    template <typename Function>
    auto with_results(const Function &function) const {
        const auto lock = lock_idle();
        return function(results_);
    }
    const pi::ModelConfig &config() const { return model_.config; }
    pi_stats stats() const;
    void reset_stats();
    void set_recording(bool on);
    void set_timing(bool on);
    std::vector<pi_layer_times> layer_times() const;

  private:
    void drive();
    void run_step();
    std::unique_lock<std::mutex> lock_idle() const;
    bool interrupted() const;

    const pi_model &model_;
    const pi::Plan plan_;
    const pi::GpuPlacement placement_;
    std::unique_ptr<pi::Side> gpu_; // where the plan places units there; it outlives the cache's pages
    std::unique_ptr<pi::Side> cpu_; // unless everything is on the device
    pi::KvCache cache_;
    pi::FfnCounts counts_;
    uint64_t n_tokens_ = 0;
    pi::Results results_;
    bool recording_ = false;
    bool timing_ = false;
    pi::LayerTimes times_;
    bool device_lost_ = false;

    pi_abort_fn abort_callback_ = nullptr;
    void *abort_user_ = nullptr;
    std::atomic<bool> abort_requested_{false};

    // Guarded by mutex_: the step in flight and how the last one ended. The numbers and the end are looked at
    // without it by threads that do not sleep yet.
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unique_ptr<pi::Step> step_;
    std::exception_ptr failure_;
    std::atomic<uint64_t> submitted_{0};
    std::atomic<uint64_t> finished_{0};
    std::atomic<bool> stopping_{false};
    std::thread driver_; // last: it uses all of the above
};
