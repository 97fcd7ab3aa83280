// ffn.cpp: the feed-forward block on the device. A few tokens one by one, so that only rows of neurons that
// fire are read; larger steps compute every neuron.
#include "stream.h"

namespace pi {
namespace {

constexpr uint32_t sparse_tokens = 4; // steps of up to this many exact tokens go one by one

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
            const pi_gpu_product down = {stream_.rows(layer_.down), nullptr, out};
            device_.call(&pi_gpu_api::multiply, &down, 1u, static_cast<const float *>(buffers_.gate),
                         n_tokens);
        }
    }

    // One token: gates, then up and down where a gate is open; predicted: of the neurons that the predictor
    // names.
    void sparse(uint32_t token) {
        const float *normed = args_.normed + uint64_t{token} * config_.n_embd;
        const pi_gpu_list *candidates = nullptr;
        args_.counts->total += n_;
        if (args_.modes[token] == PI_FFN_PREDICTED) {
            predict(token);
            candidates = &buffers_.candidates;
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

  private:
    pi_gpu_rows neurons(const Matrix &matrix) const {
        return stream_.rows(matrix, args_.neuron_begin, args_.neuron_end);
    }

    void predict(uint32_t token) {
        const float *residual = args_.residual + uint64_t{token} * config_.n_embd;
        const pi_gpu_product first = {stream_.rows(layer_.predictor_fc1), nullptr, buffers_.hidden};
        device_.call(&pi_gpu_api::multiply, &first, 1u, residual, 1u);
        device_.call(&pi_gpu_api::relu, buffers_.hidden, layer_.predictor_fc1.n_rows);
        const pi_gpu_product second = {neurons(layer_.predictor_fc2), nullptr, buffers_.logits};
        device_.call(&pi_gpu_api::multiply, &second, 1u, static_cast<const float *>(buffers_.hidden), 1u);
        device_.call(&pi_gpu_api::compact, static_cast<const float *>(buffers_.logits), n_, nullptr,
                     args_.sparse_threshold, 1u, &buffers_.candidates, buffers_.counts);
    }

    // Neurons whose activation is not 0, into the caller's record.
    void record(uint32_t token, const pi_gpu_list *list, const float *activations) {
        if (args_.fired == nullptr)
            return;
        if (args_.neuron_begin % 64 != 0)
            throw Error(PI_FAILURE, "the record of neurons begins within a word");
        const uint64_t n_words = (n_ + 63) / 64;
        uint64_t *words = buffers_.words + token * n_words;
        device_.call(&pi_gpu_api::zero, static_cast<void *>(words), n_words * sizeof(uint64_t));
        device_.call(&pi_gpu_api::record, list, n_, activations, words);
        uint64_t *host = args_.fired + token * args_.fired_stride + args_.neuron_begin / 64;
        device_.call(&pi_gpu_api::download, static_cast<const void *>(words), n_words * sizeof(uint64_t),
                     static_cast<void *>(host));
    }

    GpuStream &stream_;
    const GpuDevice &device_;
    const FfnArgs &args_;
    const LayerWeights &layer_;
    const ModelConfig &config_;
    const uint32_t n_;
    const GpuFfnBuffers &buffers_;
};

} // namespace

void gpu_ffn(GpuStream &stream, const FfnArgs &args) {
    Ffn ffn(stream, args);
    stream.counts = args.counts;
    const auto masked = [&](uint32_t token) { return args.modes[token] == PI_FFN_PREDICTED; };
    for (uint32_t begin = 0, end = 0; begin < args.n_tokens; begin = end) {
        while (end < args.n_tokens && args.modes[end] == args.modes[begin])
            ++end;
        const bool one_by_one =
            masked(begin) || (args.modes[begin] == PI_FFN_EXACT && end - begin <= sparse_tokens);
        if (!one_by_one) {
            ffn.dense(begin, end - begin);
            continue;
        }
        for (uint32_t token = begin; token < end; ++token)
            ffn.sparse(token);
    }
}

} // namespace pi
