#include "handover.h"

#include "../pool.h"
#include "stream.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace pi {
namespace {

// A side that waits longer than this for the other says so. Steps of many tokens take the CPU longer.
constexpr std::chrono::seconds limit{5}, limit_of_many{60};
constexpr uint32_t few_tokens = 16;
constexpr std::chrono::milliseconds between_checks{20};
constexpr int polls_between_clocks = 256;
// Packets of a post come within microseconds of each other; a thread that waits longer leaves it to the
// caller.
constexpr uint32_t polls_of_token = 4096;
constexpr uint32_t part_packets = delivered_columns / PI_GPU_PACKET_ELEMENTS; // parts are made of these

uint64_t nanoseconds(std::chrono::steady_clock::duration time) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

std::chrono::seconds limit_for(uint32_t n_tokens) {
    return n_tokens <= few_tokens ? limit : limit_of_many;
}

// A Linux under Windows shares its GPU with the display there.
bool is_under_windows() {
    return std::filesystem::exists("/dev/dxg");
}

uint32_t choose_way(const GpuDevice &device, uint32_t asked) {
    uint32_t spin = 0, gate = 0;
    device.call(&pi_gpu_api::waits, &spin, &gate);
    const bool may_spin = spin != 0 && !is_under_windows();
    if (asked == PI_HANDOVER_SPIN && !may_spin)
        throw Error(PI_FAILURE,
                    "hand-over spin: a display depends on this GPU, which must not wait in a kernel",
                    "use --handover event, or auto");
    if (asked == PI_HANDOVER_WAIT_VALUE && gate == 0)
        throw Error(PI_FAILURE, "hand-over wait-value: the NVIDIA driver has no cuStreamWaitValue32",
                    "use --handover auto, or a newer driver");
    if (asked != PI_HANDOVER_AUTO)
        return asked;
    return may_spin ? PI_HANDOVER_SPIN : PI_HANDOVER_EVENT;
}

// The values that one side writes and the other reads.
template <typename T>
T read(const T &flag) {
    return std::atomic_ref(const_cast<T &>(flag)).load(std::memory_order_acquire);
}
template <typename T>
void write(T &flag, T value) {
    std::atomic_ref(flag).store(value, std::memory_order_release);
}

} // namespace

HandOver::HandOver(GpuStream &stream, const ModelConfig &config, const GpuPlacement &placement,
                   const Plan &plan)
    : stream_(stream), config_(config), layers_(placement.layers), order_(config.n_layers),
      way_(choose_way(stream.device, plan.handover)) {
    uint64_t most_cold = 0;
    bool pulls = false;
    for (uint32_t layer = 0; layer < config.n_layers; ++layer) {
        const LayerPlacement &placed = layers_[layer];
        if (placed.kind != LayerKind::split)
            continue;
        pulls = pulls || placed.n_pull > placed.n_hot;
        if (placed.n_pull == config.n_ff)
            continue;
        order_[layer] = ++n_exchanges_;
        most_cold = std::max<uint64_t>(most_cold, config.n_ff - placed.n_pull);
    }
    const uint64_t n = uint64_t{plan.max_batch_tokens} * config.n_embd;
    mask_stride_ = (most_cold + 63) / 64;
    x_packets_ = packets_for_elements(config.n_embd);
    post_stride_ = x_packets_ + packets_for_words(static_cast<uint32_t>((most_cold + 31) / 32));
    control_ = share<Control>(1);
    *control_.host = {};
    gates_ = share<uint32_t>(n_exchanges_ + 1);
    posted_ = share<pi_gpu_packet>(plan.max_batch_tokens * post_stride_);
    answer_ = share<pi_gpu_packet>(uint64_t{plan.max_batch_tokens} * x_packets_);
    forget_packets();
    normed_.resize(n);
    out_.resize(n);
    mask_.resize(plan.max_batch_tokens * mask_stride_);
    step_ = stream.device.allocate<uint32_t>(2);
    pulled_ = pulls ? stream.device.allocate<float>(n) : nullptr;
}

template <typename T>
HandOver::Shared<T> HandOver::share(uint64_t n) {
    const GpuDevice::Pinned memory = stream_.pinned.allocate(n * sizeof(T));
    return {static_cast<T *>(memory.host), static_cast<T *>(memory.device), n};
}

// No packet's value is that of an exchange to come.
void HandOver::forget_packets() {
    std::memset(posted_.host, 0, posted_.n * sizeof *posted_.host);
    std::memset(answer_.host, 0, answer_.n * sizeof *answer_.host);
    base_ = 0;
}

void HandOver::begin_step() {
    base_ += n_exchanges_;
    if (base_ > PI_GPU_MAX_VALUE - n_exchanges_)
        forget_packets(); // of steps long ago
    write(control_.host->abandoned.value, 0u);
    write(control_.host->late.value, 0u);
    for (uint32_t i = 0; i < n_exchanges_; ++i)
        write(gates_.host[i], 0u);
    const uint32_t words[] = {base_, 0};
    stream_.device.call(&pi_gpu_api::upload, static_cast<const void *>(words), sizeof words,
                        static_cast<void *>(step_));
}

FfnArgs HandOver::range(const FfnArgs &args, uint32_t begin, uint32_t end, float *out) const {
    FfnArgs part = args;
    part.neuron_begin = begin;
    part.neuron_end = end;
    part.out = out;
    return part;
}

void HandOver::queue_shares(const FfnArgs &args, uint32_t layer) {
    const LayerPlacement &placed = layers_[layer];
    gpu_predict(stream_, args);
    if (order_[layer] != 0)
        queue_post(args, layer);
    if (placed.n_hot > 0)
        gpu_ffn_range(stream_, range(args, 0, placed.n_hot, args.out));
    stamp(layer, &LayerStamps::hot);
    if (placed.n_pull > placed.n_hot)
        gpu_ffn_range(stream_, range(args, placed.n_hot, placed.n_pull, pulled_));
    stamp(layer, &LayerStamps::shares);
}

void HandOver::stamp(uint32_t layer, uint64_t LayerStamps::*moment) {
    if (stream_.stamps != nullptr)
        stream_.device.call(&pi_gpu_api::stamp, &(stream_.device_stamps[layer].*moment));
}

bool HandOver::any_masked(const FfnArgs &args) {
    return std::find(args.modes, args.modes + args.n_tokens, PI_FFN_PREDICTED) != args.modes + args.n_tokens;
}

void HandOver::queue_post(const FfnArgs &args, uint32_t layer) {
    pi_gpu_post post{};
    post.base = step_;
    post.order = order_[layer];
    post.n_tokens = args.n_tokens;
    post.n_embd = config_.n_embd;
    post.x = args.normed;
    post.mask = stream_.ffn.mask + layers_[layer].n_pull / 32;
    post.mask_words = any_masked(args) ? mask_words(layer) : 0;
    post.mask_stride = (config_.n_ff + 31) / 32;
    post.out = posted_.device;
    post.out_stride = static_cast<uint32_t>(post_stride_);
    post.stamp = stream_.stamps == nullptr ? nullptr : &stream_.device_stamps[layer].posted;
    stream_.device.call(&pi_gpu_api::post, static_cast<const pi_gpu_post *>(&post));
}

void HandOver::queue_merge(const FfnArgs &args, uint32_t layer, float *residual) {
    const LayerPlacement &placed = layers_[layer];
    pi_gpu_merge merge{};
    merge.base = step_;
    merge.order = order_[layer];
    merge.n_tokens = args.n_tokens;
    merge.n_embd = config_.n_embd;
    if (way_ == PI_HANDOVER_WAIT_VALUE && order_[layer] != 0)
        merge.gate = gates_.device + order_[layer] - 1;
    merge.abandoned = &control_.device->abandoned.value;
    merge.late = &control_.device->late.value;
    merge.given_up = step_ + 1;
    merge.limit_ns = std::chrono::nanoseconds(limit_for(args.n_tokens)).count();
    merge.share[0] = placed.n_hot > 0 ? args.out : nullptr;
    merge.share[1] = placed.n_pull > placed.n_hot ? pulled_ : nullptr;
    merge.answer = order_[layer] != 0 ? answer_.device : nullptr;
    merge.answer_stride = x_packets_;
    merge.y = residual;
    merge.stamp = stream_.stamps == nullptr ? nullptr : &stream_.device_stamps[layer].end;
    stream_.device.call(&pi_gpu_api::merge, static_cast<const pi_gpu_merge *>(&merge));
}

// What happens while the CPU waits for the next packet: checks, and an end.
class HandOver::Waiting {
  public:
    Waiting(HandOver &at, uint32_t layer, uint32_t n_tokens, const std::function<void()> &check_interrupted)
        : at_(at), layer_(layer), limit_(limit_for(n_tokens)), check_interrupted_(check_interrupted) {}

    bool operator()() {
        if (++polls_ % polls_between_clocks != 0) {
            cpu_pause();
            return true;
        }
        std::this_thread::yield(); // where something else wants this core, it may well be what posts
        const Clock::time_point now = Clock::now();
        if (now < next_check_)
            return true;
        next_check_ = now + between_checks;
        at_.require_alive();
        check_interrupted_();
        if (now - begin_ > limit_)
            at_.fail_silent(layer_, limit_);
        return true;
    }

  private:
    HandOver &at_;
    const uint32_t layer_;
    const std::chrono::seconds limit_;
    const std::function<void()> &check_interrupted_;
    const Clock::time_point begin_ = Clock::now();
    Clock::time_point next_check_ = begin_;
    int polls_ = 0;
};

void HandOver::fail_silent(uint32_t layer, std::chrono::seconds waited) {
    silent_ = true;
    throw Error(PI_FAILURE, "layer " + std::to_string(layer) + ": the GPU has handed nothing over for " +
                                std::to_string(waited.count()) + " s");
}

template <typename Wait>
bool HandOver::take(const FfnArgs &args, uint32_t layer, uint32_t part, uint32_t n_parts, Wait &&wait) {
    const uint32_t value = value_of(layer), n_embd = config_.n_embd;
    const uint32_t n_words = any_masked(args) ? mask_words(layer) : 0;
    const auto part_begin = [&](uint32_t i, uint32_t n_packets) {
        const uint64_t n_units = (n_packets + part_packets - 1) / part_packets;
        return std::min(static_cast<uint32_t>(n_units * i / n_parts) * part_packets, n_packets);
    };
    const uint32_t x_begin = part_begin(part, x_packets_) * PI_GPU_PACKET_ELEMENTS;
    const uint32_t x_end = std::min(part_begin(part + 1, x_packets_) * PI_GPU_PACKET_ELEMENTS, n_embd);
    const uint32_t mask_packets = packets_for_words(n_words);
    const uint32_t mask_begin = part_begin(part, mask_packets) * PI_GPU_PACKET_WORDS;
    const uint32_t mask_end = std::min(part_begin(part + 1, mask_packets) * PI_GPU_PACKET_WORDS, n_words);
    for (uint32_t token = 0; token < args.n_tokens; ++token) {
        const pi_gpu_packet *x = posted_.host + token * post_stride_;
        const pi_gpu_packet *mask = x + x_packets_;
        auto *words = reinterpret_cast<uint32_t *>(&mask_[token * mask_stride_]);
        if (!take_elements(x + x_begin / PI_GPU_PACKET_ELEMENTS, x_end - x_begin, value,
                           &normed_[uint64_t{token} * n_embd] + x_begin, wait) ||
            !take_words(mask + mask_begin / PI_GPU_PACKET_WORDS, mask_end - mask_begin, value,
                        words + mask_begin, wait))
            return false;
    }
    return true;
}

Posted HandOver::await(const FfnArgs &args, uint32_t layer, const OnThreads &on_threads,
                       const std::function<void()> &check_interrupted) {
    const Clock::time_point begin = Clock::now();
    answering_ = value_of(layer);
    Waiting wait(*this, layer, args.n_tokens, check_interrupted);
    WholePacket first;
    await_packet(posted_.host, answering_, wait, first);
    std::atomic<bool> all = true;
    on_threads([&](uint32_t part, uint32_t n_parts) {
        uint32_t polls = 0;
        const auto wait_a_little = [&] {
            if (++polls % polls_between_clocks == 0)
                std::this_thread::yield();
            cpu_pause();
            return polls < polls_of_token * args.n_tokens;
        };
        if (!take(args, layer, part, n_parts, wait_a_little))
            all.store(false, std::memory_order_relaxed);
    });
    if (!all.load(std::memory_order_relaxed))
        take(args, layer, 0, 1, wait);
    posted_at_ = Clock::now();
    if (stream_.stamps != nullptr)
        stream_.stamps[layer].cpu_wait_ns = nanoseconds(posted_at_ - begin);
    return {normed_.data(), mask_.data(), mask_stride_, out_.data(), &deliver_};
}

void HandOver::deliver(uint32_t token, uint32_t begin, uint32_t end) {
    give_elements(&out_[uint64_t{token} * config_.n_embd] + begin, end - begin, answering_,
                  answer_.host + uint64_t{token} * x_packets_ + begin / PI_GPU_PACKET_ELEMENTS);
}

void HandOver::finish_answer(uint32_t layer) {
    if (stream_.stamps != nullptr)
        stream_.stamps[layer].cpu_ns = nanoseconds(Clock::now() - posted_at_);
    write(gates_.host[order_[layer] - 1], 1u);
}

void HandOver::give_up() {
    write(control_.host->abandoned.value, 1u);
    for (uint32_t i = 0; i < n_exchanges_; ++i)
        write(gates_.host[i], 1u);
}

// A device that failed, or that gave up, posts nothing more.
void HandOver::require_alive() const {
    require_answered();
    uint32_t busy = 0;
    stream_.device.call(&pi_gpu_api::query, &busy); // while the CPU waits, so no kernel waits for the CPU
}

void HandOver::require_answered() const {
    const uint32_t late = read(control_.host->late.value);
    for (uint32_t layer = 0; late != 0 && layer < config_.n_layers; ++layer) {
        if (order_[layer] != 0 && value_of(layer) == late)
            throw Error(PI_FAILURE,
                        "layer " + std::to_string(layer) +
                            ": the GPU has waited for the CPU's share for longer than " +
                            std::to_string(limit.count()) + " s",
                        "another program may keep the CPU's cores busy; use fewer threads (-t)");
    }
}

} // namespace pi
