// ffn.cpp: the feed-forward block on the device. A few tokens one by one, so that only rows of neurons that
// fire are read; larger steps compute every neuron.
#include "stream.h"

namespace pi {
namespace {

constexpr uint32_t sparse_tokens = 4; // steps of up to this many exact tokens go one by one

// Neurons of a word of a mask.
constexpr uint32_t word_bits = 32;

uint32_t mask_words(const ModelConfig &config) {
    return (config.n_ff + word_bits - 1) / word_bits;
}

bool is_masked(const FfnArgs &args, uint32_t token) {
    return args.modes[token] == PI_FFN_PREDICTED;
}

class Ffn {
  public:
    Ffn(GpuStream &stream, const FfnArgs &args)
        : stream_(stream), device_(stream.device), args_(args), layer_(*args.layer), config_(*args.config),
          n_(args.neuron_end - args.neuron_begin), buffers_(stream.ffn) {}

    // Every neuron of every token of the range.
    void dense(uint32_t begin, uint32_t n_tokens) {
        const float *normed = args_.normed + uint64_t{begin} * config_.n_embd;
        const pi_gpu_product products[] = {{neurons(layer_.gate), nullptr, buffers_.gate},
                                           {neurons(layer_.up), nullptr, buffers_.up}};
        device_.call(&pi_gpu_api::multiply, products, 2u, normed, n_tokens);
        const bool relu = config_.activation == Activation::relu;
        const uint64_t n = uint64_t{n_tokens} * n_;
        const bool counted = relu && args_.modes[begin] != PI_FFN_DENSE;
        device_.call(&pi_gpu_api::gated, static_cast<uint32_t>(config_.activation),
                     config_.activation_threshold, static_cast<const float *>(buffers_.up), n, buffers_.gate,
                     counted ? buffers_.counts + 1 : nullptr);
        args_.counts->total += n;
        args_.counts->guessed += n;
        args_.counts->active += counted ? 0 : n;
        for (uint32_t t = 0; t < n_tokens; ++t)
            record(begin + t, nullptr, buffers_.gate + uint64_t{t} * n_);
        float *out = args_.out + uint64_t{begin} * config_.n_embd;
        if (config_.sparse_layout) {
            const pi_gpu_rows rows = neurons(layer_.down_t);
            device_.call(&pi_gpu_api::multiply_transposed, &rows, static_cast<const float *>(buffers_.gate),
                         n_tokens, out);
        } else {
            const Matrix columns = layer_.down.columns(args_.neuron_begin, args_.neuron_end);
            const pi_gpu_product down = {stream_.rows(columns), nullptr, out};
            device_.call(&pi_gpu_api::multiply, &down, 1u, static_cast<const float *>(buffers_.gate),
                         n_tokens);
        }
    }

    // One token: gates, then up and down where a gate is open; predicted: of the neurons that its mask names.
    void sparse(uint32_t token) {
        const float *normed = args_.normed + uint64_t{token} * config_.n_embd;
        const pi_gpu_list *candidates = nullptr;
        args_.counts->total += n_;
        if (is_masked(args_, token)) {
            candidates = &buffers_.candidates;
            const uint32_t *mask = buffers_.mask + uint64_t{token} * mask_words(config_);
            device_.call(&pi_gpu_api::list_mask, mask + args_.neuron_begin / word_bits, n_, candidates,
                         buffers_.counts);
            const pi_gpu_rows rows = neurons(layer_.gate);
            device_.call(&pi_gpu_api::multiply_listed, &rows, candidates, normed, buffers_.gate);
        } else {
            args_.counts->guessed += n_;
            const pi_gpu_product gate = {neurons(layer_.gate), nullptr, buffers_.gate};
            device_.call(&pi_gpu_api::multiply, &gate, 1u, normed, 1u);
        }
        device_.call(&pi_gpu_api::compact, static_cast<const float *>(buffers_.gate), n_, candidates,
                     config_.activation_threshold, 0u, &buffers_.fired, buffers_.counts + 1);
        const pi_gpu_rows up = neurons(layer_.up), down = neurons(layer_.down_t);
        device_.call(&pi_gpu_api::multiply_listed, &up, &buffers_.fired, normed, buffers_.coef);
        record(token, &buffers_.fired, buffers_.coef);
        device_.call(&pi_gpu_api::accumulate_listed, &down, &buffers_.fired,
                     static_cast<const float *>(buffers_.coef), args_.out + uint64_t{token} * config_.n_embd);
    }

    // Masks of a few tokens, over all neurons of the layer.
    void predict(uint32_t begin, uint32_t n_tokens) {
        const float *residual = args_.residual + uint64_t{begin} * config_.n_embd;
        const uint64_t rank = layer_.predictor_fc1.n_rows;
        const pi_gpu_product first = {stream_.rows(layer_.predictor_fc1), nullptr, buffers_.hidden};
        device_.call(&pi_gpu_api::multiply, &first, 1u, residual, n_tokens);
        device_.call(&pi_gpu_api::relu, buffers_.hidden, rank * n_tokens);
        const pi_gpu_product second = {stream_.rows(layer_.predictor_fc2), nullptr, buffers_.logits};
        device_.call(&pi_gpu_api::multiply, &second, 1u, static_cast<const float *>(buffers_.hidden),
                     n_tokens);
        device_.call(&pi_gpu_api::mask, static_cast<const float *>(buffers_.logits), n_tokens, config_.n_ff,
                     args_.sparse_threshold, buffers_.mask + uint64_t{begin} * mask_words(config_));
    }

  private:
    pi_gpu_rows neurons(const Matrix &matrix) const {
        return stream_.rows(matrix, args_.neuron_begin, args_.neuron_end);
    }

    // Neurons whose activation is not 0, into the caller's record: whole bytes, which no other range shares.
    void record(uint32_t token, const pi_gpu_list *list, const float *activations) {
        if (args_.fired == nullptr)
            return;
        const uint64_t n_bytes = (n_ + 7) / 8;
        uint64_t *words = buffers_.words + token * ((n_ + 63) / 64);
        device_.call(&pi_gpu_api::zero, static_cast<void *>(words), (n_ + 63) / 64 * sizeof(uint64_t));
        device_.call(&pi_gpu_api::record, list, n_, activations, words);
        auto *host = reinterpret_cast<uint8_t *>(args_.fired + token * args_.fired_stride);
        device_.call(&pi_gpu_api::download, static_cast<const void *>(words), n_bytes,
                     static_cast<void *>(host + args_.neuron_begin / 8));
    }

    GpuStream &stream_;
    const GpuDevice &device_;
    const FfnArgs &args_;
    const LayerWeights &layer_;
    const ModelConfig &config_;
    const uint32_t n_;
    const GpuFfnBuffers &buffers_;
};

// Calls run(begin, end) for the runs of neighbours that `same` puts together, of at most `most` tokens.
template <typename Same, typename Run>
void for_runs(uint32_t n_tokens, uint32_t most, const Same &same, const Run &run) {
    for (uint32_t begin = 0, end = 0; begin < n_tokens; begin = end) {
        end = begin + 1;
        while (end < n_tokens && end - begin < most && same(begin, end))
            ++end;
        run(begin, end);
    }
}

} // namespace

void gpu_predict(GpuStream &stream, const FfnArgs &args) {
    Ffn ffn(stream, args);
    const auto same = [&](uint32_t a, uint32_t b) { return is_masked(args, a) == is_masked(args, b); };
    for_runs(args.n_tokens, GpuFfnBuffers::predicted_together, same, [&](uint32_t begin, uint32_t end) {
        if (is_masked(args, begin))
            ffn.predict(begin, end - begin);
    });
}

void gpu_ffn_range(GpuStream &stream, const FfnArgs &args) {
    Ffn ffn(stream, args);
    stream.counts = args.counts;
    const auto same = [&](uint32_t a, uint32_t b) { return args.modes[a] == args.modes[b]; };
    for_runs(args.n_tokens, args.n_tokens, same, [&](uint32_t begin, uint32_t end) {
        const bool few = args.modes[begin] == PI_FFN_EXACT && end - begin <= sparse_tokens;
        if (!is_masked(args, begin) && !few)
            return ffn.dense(begin, end - begin);
        for (uint32_t token = begin; token < end; ++token)
            ffn.sparse(token);
    });
}

void gpu_ffn(GpuStream &stream, const FfnArgs &args) {
    gpu_predict(stream, args);
    gpu_ffn_range(stream, args);
}

} // namespace pi
