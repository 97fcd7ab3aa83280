// handover.h: how the two sides of a split layer meet. The device posts the normed tokens and the predictor's
// masks to pinned host memory and computes its own neurons; the CPU computes the others from what was posted,
// and answers with one vector a token, which the device adds. docs/hybrid.md has the picture.
#pragma once

#include "../ops.h"
#include "../plan.h"
#include "library.h"
#include "packets.h"

#include <atomic>
#include <chrono>
#include <functional>

namespace pi {

struct GpuStream;

// What the CPU computes its neurons from, and where it writes their share.
struct Posted {
    const float *normed;  // [n_tokens, n_embd]
    const uint64_t *mask; // [n_tokens, mask_stride] bit i: neuron n_pull + i; of predicted tokens
    uint64_t mask_stride;
    AwaitMasks await_masks;        // which come later than normed; empty: no token is predicted
    float *out;                    // [n_tokens, n_embd]
    const DeliverColumns *deliver; // called for every column: answers with it
};

class HandOver {
    using Clock = std::chrono::steady_clock;

  public:
    // Throws Error: no memory (PI_DOES_NOT_FIT), or a way that the plan asks for and the device does not
    // have.
    HandOver(GpuStream &stream, const ModelConfig &config, const GpuPlacement &placement, const Plan &plan);
    HandOver(const HandOver &) = delete;
    HandOver &operator=(const HandOver &) = delete;

    // ---- queued on the device; the same operations every step, so that they may be recorded
    // What a layer needs of the CPU is posted; args.out becomes the share of the neurons in device memory,
    // and pulled ones are computed too.
    void queue_shares(const FfnArgs &args, uint32_t layer);
    // residual += all shares of the layer, once the CPU has answered.
    void queue_merge(const FfnArgs &args, uint32_t layer, float *residual);

    // ---- on the CPU, layer by layer
    // Before the operations of a step; the device is idle.
    void begin_step();
    // Waits for a layer's normed tokens, which the threads take together. `check_interrupted` is called now
    // and then. Throws Error: the device failed, posts nothing, or has given up waiting for the CPU. What is
    // returned stands until the next, and calls the functions given here.
    Posted await(const FfnArgs &args, uint32_t layer, const OnThreads &on_threads,
                 const std::function<void()> &check_interrupted);
    // All columns of the answer are delivered.
    void finish_answer(uint32_t layer);
    // What is queued waits for no answer from here on.
    void give_up();
    // The device has posted nothing in time: waiting for it could take for ever.
    bool is_silent() const { return silent_; }
    // After a step's work: throws Error where the device gave up waiting for the CPU.
    void require_answered() const;

    // PI_HANDOVER_*, but for AUTO.
    uint32_t way() const { return way_; }
    // Whether a series of layers may be queued at once, before the CPU has answered the first.
    bool queues_ahead() const { return way_ != PI_HANDOVER_EVENT; }

  private:
    // In host memory, written by one side and read by the other; a cache line each.
    struct alignas(64) Flag {
        uint32_t value;
    };
    struct Control {
        Flag abandoned; // CPU: not 0: it answers no more
        Flag late;      // device: the exchange it gave up to wait for; 0: none
    };

    template <typename T>
    struct Shared {
        T *host;
        T *device;
        uint64_t n;
    };
    template <typename T>
    Shared<T> share(uint64_t n);

    uint32_t value_of(uint32_t layer) const { return base_ + order_[layer]; }
    void forget_packets();
    // Words of a token's mask over the CPU's neurons of the layer.
    uint32_t mask_words(uint32_t layer) const { return (config_.n_ff - layers_[layer].n_pull + 31) / 32; }
    class Waiting;
    // A part of the tokens that are posted, or the mask of one. Whether all came.
    template <typename Wait>
    bool take_x(uint32_t n_tokens, uint32_t part, uint32_t n_parts, Wait &&wait);
    template <typename Wait>
    bool take_mask(uint32_t layer, uint32_t token, Wait &&wait);
    template <typename Take>
    void take_together(const pi_gpu_packet *first, const OnThreads &on_threads, Waiting &wait,
                       const Take &take);
    void await_masks(const FfnArgs &args, uint32_t layer, uint32_t begin, uint32_t end,
                     const OnThreads &on_threads, const std::function<void()> &check_interrupted);
    void deliver(uint32_t token, uint32_t begin, uint32_t end);
    // Every now and then: throws Error where the device is not alive, or the caller interrupted.
    void check(Clock::time_point now, const std::function<void()> &check_interrupted);
    void require_alive() const;
    [[noreturn]] void fail_silent(uint32_t layer, std::chrono::seconds waited);
    FfnArgs range(const FfnArgs &args, uint32_t begin, uint32_t end, float *out) const;
    void queue_range(const FfnArgs &args) const;
    pi_gpu_post post_of(uint32_t layer) const;
    void queue_normed(const FfnArgs &args, uint32_t layer);
    // Where layers are timed: this moment of the layer is here.
    void stamp(uint32_t layer, uint64_t LayerStamps::*moment);

    GpuStream &stream_;
    const ModelConfig &config_;
    const std::vector<LayerPlacement> layers_;
    std::vector<uint32_t> order_; // [n_layers] of the layer's exchange in a step, from 1; 0: it has none
    uint32_t n_exchanges_ = 0;    // of a step
    uint32_t base_ = 0;           // exchange k of this step has the value base_ + k
    uint32_t way_;
    bool silent_ = false;
    Clock::time_point next_check_;
    Clock::time_point posted_at_; // when the CPU had what it computes from
    uint64_t waited_ns_ = 0;      // for that
    uint64_t mask_stride_;        // 64-bit words of a token
    uint32_t x_packets_;          // of a token, of what is posted and of the answer
    uint64_t post_stride_;        // packets of a token: x, then the mask
    uint32_t answering_ = 0;      // the value of what is delivered
    DeliverColumns deliver_ = [this](uint32_t token, uint32_t begin, uint32_t end) {
        deliver(token, begin, end);
    };
    Shared<Control> control_;
    Shared<uint32_t> gates_;       // [n_exchanges] CPU: not 0: answered; where the stream waits for that
    Shared<pi_gpu_packet> posted_; // [max_tokens, post_stride]
    Shared<pi_gpu_packet> answer_; // [max_tokens, x_packets]
    std::vector<float> normed_;    // [max_tokens, n_embd]
    std::vector<float> out_;       // [max_tokens, n_embd]
    std::vector<uint64_t> mask_;   // [max_tokens, mask_stride]
    uint32_t *step_;               // device: base_, and whether the step was given up
    float *pulled_;                // device: [max_tokens, n_embd] share of the pulled neurons
};

} // namespace pi
