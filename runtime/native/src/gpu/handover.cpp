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
constexpr std::chrono::milliseconds between_checks{20};
constexpr int polls_between_clocks = 256;
// A thread that waits longer for a packet leaves it to the caller.
constexpr uint32_t polls_of_thread = 16384; // under a millisecond
static_assert(delivered_columns % PI_GPU_PACKET_ELEMENTS == 0);

uint64_t nanoseconds(std::chrono::steady_clock::duration time) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

std::chrono::seconds limit_for(uint32_t n_tokens) {
    return n_tokens <= Plan::few_tokens ? limit : limit_of_many;
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
    next_check_ = Clock::now();
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
    part.norm = nullptr; // args.normed is there
    part.neuron_begin = begin;
    part.neuron_end = end;
    part.out = out;
    return part;
}

void HandOver::queue_range(const FfnArgs &args) const {
    gpu_ffn_range(stream_, args, stream_.neurons(*args.layer, config_, args.neuron_begin, args.neuron_end));
}

void HandOver::queue_shares(const FfnArgs &args, uint32_t layer) {
    const LayerPlacement &placed = layers_[layer];
    queue_normed(args, layer);
    pi_gpu_post post = post_of(layer);
    if (post.out != nullptr)
        post.out += x_packets_;
    gpu_predict(stream_, args, placed.n_pull / 32, post);
    if (placed.n_hot > 0)
        queue_range(range(args, 0, placed.n_hot, args.out));
    stamp(layer, &LayerStamps::hot);
    if (placed.n_pull > placed.n_hot)
        queue_range(range(args, placed.n_hot, placed.n_pull, pulled_));
    stamp(layer, &LayerStamps::shares);
}

void HandOver::stamp(uint32_t layer, uint64_t LayerStamps::*moment) {
    if (stream_.stamps != nullptr)
        stream_.device.call(&pi_gpu_api::stamp, &(stream_.device_stamps[layer].*moment));
}

pi_gpu_post HandOver::post_of(uint32_t layer) const {
    pi_gpu_post post{};
    if (order_[layer] == 0)
        return post;
    post.base = step_;
    post.order = order_[layer];
    post.out_stride = static_cast<uint32_t>(post_stride_);
    post.out = posted_.device;
    post.stamp = stream_.stamps == nullptr ? nullptr : &stream_.device_stamps[layer].posted;
    return post;
}

// args.normed of the residual, which the CPU gets before the predictor has begun.
void HandOver::queue_normed(const FfnArgs &args, uint32_t layer) {
    const pi_gpu_norm norm = *stream_.norm(args.norm);
    if (order_[layer] == 0)
        return stream_.device.call(&pi_gpu_api::rms_norm, args.residual, norm.gain, args.n_tokens,
                                   config_.n_embd, norm.eps, norm.out);
    pi_gpu_post_x work{};
    work.post = post_of(layer);
    work.n_tokens = args.n_tokens;
    work.n_embd = config_.n_embd;
    work.x = args.residual;
    work.norm = norm;
    stream_.device.call(&pi_gpu_api::post, static_cast<const pi_gpu_post_x *>(&work));
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
        at_.check(now, check_interrupted_);
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
    int polls_ = 0;
};

void HandOver::check(Clock::time_point now, const std::function<void()> &check_interrupted) {
    if (now < next_check_)
        return;
    next_check_ = now + between_checks;
    require_alive();
    check_interrupted();
}

void HandOver::fail_silent(uint32_t layer, std::chrono::seconds waited) {
    silent_ = true;
    throw Error(PI_FAILURE, "layer " + std::to_string(layer) + ": the GPU has handed nothing over for " +
                                std::to_string(waited.count()) + " s");
}

// Elements or words [begin, end) of part i of n: whole parts of `each`.
struct Slice {
    Slice(uint32_t n, uint32_t each, uint32_t i, uint32_t n_parts) {
        const uint64_t n_units = (n + each - 1) / each;
        begin = std::min(static_cast<uint32_t>(n_units * i / n_parts) * each, n);
        end = std::min(static_cast<uint32_t>(n_units * (i + 1) / n_parts) * each, n);
    }
    uint32_t begin, end;
};

template <typename Wait>
bool HandOver::take_x(uint32_t n_tokens, uint32_t part, uint32_t n_parts, Wait &&wait) {
    const Slice slice(config_.n_embd, delivered_columns, part, n_parts);
    for (uint32_t token = 0; token < n_tokens; ++token) {
        if (!take_elements(posted_.host + token * post_stride_ + slice.begin / PI_GPU_PACKET_ELEMENTS,
                           slice.end - slice.begin, answering_,
                           &normed_[uint64_t{token} * config_.n_embd] + slice.begin, wait))
            return false;
    }
    return true;
}

template <typename Wait>
bool HandOver::take_mask(uint32_t layer, uint32_t token, Wait &&wait) {
    return take_words(posted_.host + token * post_stride_ + x_packets_, mask_words(layer), answering_,
                      reinterpret_cast<uint32_t *>(&mask_[token * mask_stride_]), wait);
}

// take(part, n_parts, wait), which says whether all came: by the threads, who wait a little; where that was
// not enough again when the packet `first` is there, and at last by the caller alone, who looks at the clock.
template <typename Take>
void HandOver::take_together(const pi_gpu_packet *first, const OnThreads &on_threads, Waiting &wait,
                             const Take &take) {
    for (int i = 0; i < 2; ++i) {
        std::atomic<bool> all = true;
        on_threads([&](uint32_t part, uint32_t n_parts) {
            uint32_t polls = 0;
            const auto wait_a_little = [&] {
                if (++polls % polls_between_clocks == 0)
                    std::this_thread::yield();
                cpu_pause();
                return polls < polls_of_thread;
            };
            if (!take(part, n_parts, wait_a_little))
                all.store(false, std::memory_order_relaxed);
        });
        if (all.load(std::memory_order_relaxed))
            return;
        WholePacket packet;
        await_packet(first, answering_, wait, packet);
    }
    take(0, 1, wait);
}

Posted HandOver::await(const FfnArgs &args, uint32_t layer, const OnThreads &on_threads,
                       const std::function<void()> &check_interrupted) {
    const Clock::time_point begin = Clock::now();
    check(begin, check_interrupted);
    answering_ = value_of(layer);
    Waiting wait(*this, layer, args.n_tokens, check_interrupted);
    take_together(posted_.host, on_threads, wait, [&](uint32_t part, uint32_t n_parts, auto &&patience) {
        return take_x(args.n_tokens, part, n_parts, patience);
    });
    posted_at_ = Clock::now();
    waited_ns_ = nanoseconds(posted_at_ - begin);
    Posted posted{normed_.data(), mask_.data(), mask_stride_, {}, out_.data(), &deliver_};
    if (std::find(args.modes, args.modes + args.n_tokens, PI_FFN_PREDICTED) != args.modes + args.n_tokens)
        posted.await_masks = [this, &args, layer, &on_threads, &check_interrupted](uint32_t from,
                                                                                   uint32_t end) {
            await_masks(args, layer, from, end, on_threads, check_interrupted);
        };
    return posted;
}

void HandOver::await_masks(const FfnArgs &args, uint32_t layer, uint32_t begin, uint32_t end,
                           const OnThreads &on_threads, const std::function<void()> &check_interrupted) {
    const Clock::time_point before = Clock::now();
    Waiting wait(*this, layer, args.n_tokens, check_interrupted);
    std::vector<uint32_t> tokens;
    for (uint32_t token = begin; token < end; ++token) {
        if (args.modes[token] == PI_FFN_PREDICTED)
            tokens.push_back(token);
    }
    const auto take = [&](uint32_t part, uint32_t n_parts, auto &&patience) {
        for (size_t i = part; i < tokens.size(); i += n_parts) {
            if (!take_mask(layer, tokens[i], patience))
                return false;
        }
        return true;
    };
    if (tokens.size() == 1)
        take(0, 1, wait); // a few cache lines
    else if (!tokens.empty())
        take_together(posted_.host + tokens[0] * post_stride_ + x_packets_, on_threads, wait, take);
    // The CPU's time runs from the first masks on; what it waits for later ones is none of it.
    const Clock::time_point now = Clock::now();
    posted_at_ = begin == 0 ? now : posted_at_ + (now - before);
    waited_ns_ += nanoseconds(now - before);
}

void HandOver::deliver(uint32_t token, uint32_t begin, uint32_t end) {
    give_elements(&out_[uint64_t{token} * config_.n_embd] + begin, end - begin, answering_,
                  answer_.host + uint64_t{token} * x_packets_ + begin / PI_GPU_PACKET_ELEMENTS);
}

void HandOver::finish_answer(uint32_t layer) {
    if (stream_.stamps != nullptr) {
        stream_.stamps[layer].cpu_ns = nanoseconds(Clock::now() - posted_at_);
        stream_.stamps[layer].cpu_wait_ns = waited_ns_;
    }
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
