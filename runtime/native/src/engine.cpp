#include "engine.h"

#include "cpu/stream.h"
#include "gpu/backend.h"
#include "pool.h"
#include "signals.h"
#include "status.h"

#include <chrono>

namespace {

// A sleeping thread of a virtual machine takes 50 us and more to wake, twice a token, where a small model's
// token takes 700 us on a GPU. So the driver looks for the next step for some 200 us, longer than callers
// take to draw a token; and a caller for the end of a step for some 5 ms, unless the CPU's threads need its
// core.
constexpr int rounds_between_steps = 10'000, rounds_of_a_step = 250'000;

pi::KvShape kv_shape(const pi::Plan &plan, const pi::ModelConfig &config) {
    return {config.n_layers,
            config.n_kv_heads,
            config.head_dim,
            plan.n_kv_pages,
            plan.n_sequences,
            plan.n_context,
            plan.kv_type == PI_TYPE_F32 ? 4u : 2u};
}

std::unique_ptr<pi::Side> open_gpu(const pi_model &model, const pi::Plan &plan,
                                   const pi::GpuPlacement &placement) {
    if (!placement.any())
        return nullptr;
    return std::make_unique<pi::Side>(pi::open_gpu_backend(model, plan, placement), model.config,
                                      plan.max_batch_tokens);
}

std::unique_ptr<pi::Side> open_cpu(const pi_model &model, const pi::Plan &plan,
                                   const pi::GpuPlacement &placement, const char *isa) {
    if (placement.all())
        return nullptr;
    return std::make_unique<pi::Side>(
        pi::open_cpu_backend(plan.n_threads, isa, plan.activation_type == PI_TYPE_Q8_0), model.config,
        plan.max_batch_tokens);
}

// After a failure: what is queued may still write to this step's results. False: the device does not come
// back.
bool settle(const pi::Sides &sides) noexcept {
    try {
        if (sides.hand_over != nullptr)
            sides.hand_over->give_up();
        if (sides.hand_over != nullptr && sides.hand_over->is_silent())
            return false;
        sides.synchronize();
    } catch (...) { // the step's first failure is the one to tell
    }
    return true;
}

pi::KvCache make_cache(const pi_model &model, const pi::Plan &plan, const pi::GpuPlacement &placement,
                       pi::Side *gpu) {
    const pi::KvShape shape = kv_shape(plan, model.config);
    if (gpu == nullptr)
        return pi::KvCache(shape);
    const std::vector<uint8_t> layers = placement.on_device();
    return pi::KvCache(shape, pi::make_gpu_pages(gpu->stream, shape, layers), layers);
}

} // namespace

pi_engine::pi_engine(const pi_model &model, const pi_plan &plan)
    : model_(model), plan_(pi::check_plan(plan, model.config, model.weights)),
      placement_(pi::gpu_placement(plan_, model.config)), gpu_(open_gpu(model, plan_, placement_)),
      cpu_(open_cpu(model, plan_, placement_, plan.isa)),
      cache_(make_cache(model, plan_, placement_, gpu_.get())), times_(model.config.n_layers) {
    const pi::BlockedSignals blocked;
    driver_ = std::thread([this] { drive(); });
}

pi_engine::~pi_engine() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        abort_requested_ = true;
    }
    changed_.notify_all();
    driver_.join();
    if (device_lost_) // what it may still write goes to members
        static_cast<void>(settle({cpu_.get(), gpu_.get(), nullptr, nullptr, placement_}));
}

std::unique_lock<std::mutex> pi_engine::lock_idle() const {
    std::unique_lock lock(mutex_);
    if (finished_ != submitted_)
        pi::throw_usage("a step is still running: wait for it first");
    return lock;
}

void pi_engine::set_abort(pi_abort_fn callback, void *user) {
    const auto lock = lock_idle();
    abort_callback_ = callback;
    abort_user_ = user;
}

bool pi_engine::interrupted() const {
    return abort_requested_ || (abort_callback_ != nullptr && abort_callback_(abort_user_) != 0);
}

uint64_t pi_engine::submit(const pi_batch &batch) {
    const auto lock = lock_idle();
    if (device_lost_)
        throw pi::Error(PI_FAILURE, "the GPU did not come back from an earlier step",
                        "end the program; if it happens again, use --vram-budget 0");
    step_ = std::make_unique<pi::Step>(batch, model_.config, cache_, plan_.max_batch_tokens);
    failure_ = nullptr;
    abort_requested_ = false;
    changed_.notify_all();
    return ++submitted_;
}

bool pi_engine::wait(uint64_t ticket, uint32_t timeout_ms) {
    if (ticket == 0 || ticket > submitted_)
        pi::throw_usage("no step has this ticket");
    const auto done = [&] { return finished_ >= ticket; };
    if (cpu_ == nullptr && timeout_ms != 0)
        pi::spin_until(rounds_of_a_step, done);
    std::unique_lock lock(mutex_);
    if (timeout_ms == UINT32_MAX) {
        changed_.wait(lock, done);
    } else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), done)) {
        return false;
    }
    if (ticket == finished_ && failure_ != nullptr)
        std::rethrow_exception(failure_);
    return true;
}

void pi_engine::drive() {
    const auto called = [&] { return stopping_ || finished_ != submitted_; };
    for (;;) {
        pi::spin_until(rounds_between_steps, called);
        std::unique_lock lock(mutex_);
        changed_.wait(lock, called);
        if (stopping_)
            return;
        lock.unlock();
        std::exception_ptr failure;
        try {
            run_step();
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        failure_ = failure;
        finished_ = submitted_.load();
        changed_.notify_all();
    }
}

void pi_engine::run_step() {
    const pi::Step &step = *step_;
    const pi::Sides sides{cpu_.get(), gpu_.get(), gpu_ == nullptr ? nullptr : pi::gpu_hand_over(gpu_->stream),
                          gpu_ == nullptr ? nullptr : pi::gpu_cold_weights(gpu_->stream), placement_};
    const pi::Forward forward{model_, plan_, sides, cache_, recording_};
    pi::FfnCounts counts;
    try {
        for (const auto &[sequence, n] : step.growth)
            cache_.reserve(sequence, n);
        forward.run(step, [this] { return interrupted(); }, counts, results_);
        model_.mapping.require_unchanged();
    } catch (...) { // the sequences stay as they were
        device_lost_ = !settle(sides);
        for (const auto &[sequence, n] : step.growth)
            cache_.truncate(sequence, cache_.length(sequence));
        throw;
    }
    for (const auto &[sequence, n] : step.growth)
        cache_.advance(sequence, n);
    counts_.total += counts.total;
    counts_.guessed += counts.guessed;
    counts_.active += counts.active;
    n_tokens_ += step.n_tokens();
    if (timing_)
        times_.add(placement_, cpu_ == nullptr ? nullptr : cpu_->stream.stamps,
                   gpu_ == nullptr ? nullptr : gpu_->stream.stamps);
}

pi_stats pi_engine::stats() const {
    const auto lock = lock_idle();
    pi_stats stats{};
    stats.size = sizeof(stats);
    stats.n_threads = plan_.n_threads;
    stats.n_tokens = n_tokens_;
    stats.neurons_total = counts_.total;
    stats.neurons_active = counts_.active;
    stats.neurons_guessed = counts_.guessed;
    stats.kv_bytes = cache_.n_bytes();
    if (cpu_ != nullptr) {
        stats.scratch_bytes = cpu_->buffers.n_bytes();
        stats.isa = cpu_->backend.isa;
    }
    if (gpu_ != nullptr)
        pi::describe_gpu(*gpu_, stats);
    return stats;
}

void pi_engine::reset_stats() {
    const auto lock = lock_idle();
    counts_ = {};
    n_tokens_ = 0;
}

void pi_engine::set_recording(bool on) {
    const auto lock = lock_idle();
    recording_ = on;
}

void pi_engine::set_timing(bool on) {
    const auto lock = lock_idle();
    for (pi::Side *side : {cpu_.get(), gpu_.get()}) {
        if (side != nullptr)
            side->ops.time_layers(side->stream, on ? model_.config.n_layers : 0);
    }
    timing_ = on;
    times_.clear();
}

std::vector<pi_layer_times> pi_engine::layer_times() const {
    const auto lock = lock_idle();
    return times_.all();
}
