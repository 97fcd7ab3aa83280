// ffn.cpp: the feed-forward block on the device. A few tokens one by one, so that only rows of neurons that
// fire are read; larger steps compute every neuron, and drop what masks do not name.
#include "stream.h"

namespace pi {
namespace {

constexpr uint32_t sparse_tokens = 4;                // up to this many exact tokens go one by one
constexpr uint32_t masked_tokens = Plan::few_tokens; // and predicted ones

// Neurons of a word of a mask.
constexpr uint32_t word_bits = 32;

uint32_t mask_words(const ModelConfig &config) {
    return (config.n_ff + word_bits - 1) / word_bits;
}

bool is_masked(const FfnArgs &args, uint32_t token) {
    return args.modes[token] == PI_FFN_PREDICTED;
}

// A step's only token, whose neurons are chosen where they are computed.
bool is_lone(const FfnArgs &args) {
    return args.n_tokens == 1 && is_masked(args, 0);
}

pi_gpu_product product(const pi_gpu_rows &rows, float *out, uint32_t add = 0) {
    return {rows, nullptr, out, add, 0};
}

class Predictor {
  public:
    Predictor(const GpuStream &stream, const FfnArgs &args)
        : stream_(stream), args_(args), layer_(*args.layer), config_(*args.config), buffers_(stream.ffn) {}

    // Of neurons [begin, end), for the token in buffers_.hidden.
    pi_gpu_predictor range(uint32_t begin, uint32_t end) const {
        return {stream_.rows(layer_.predictor_fc2, begin, end), buffers_.hidden, args_.sparse_threshold,
                buffers_.logits + begin, buffers_.mask + begin / word_bits};
    }

    // Masks of a few tokens, over all neurons of the layer; token 0's row of what is posted is post.out.
    void mask(uint32_t begin, uint32_t n_tokens, uint32_t first_word, const pi_gpu_post &post) const {
        hidden_units(begin, n_tokens);
        const pi_gpu_product second = product(stream_.rows(layer_.predictor_fc2), buffers_.logits);
        stream_.device.call(&pi_gpu_api::multiply, &second, 1u, static_cast<const float *>(buffers_.hidden),
                            n_tokens, nullptr);
        pi_gpu_mask mask{};
        mask.logits = buffers_.logits;
        mask.n_tokens = n_tokens;
        mask.n = config_.n_ff;
        mask.threshold = args_.sparse_threshold;
        mask.first_word = first_word;
        mask.words = buffers_.mask + uint64_t{begin} * mask_words(config_);
        mask.post = post;
        if (post.out != nullptr)
            mask.post.out += uint64_t{begin} * post.out_stride;
        stream_.device.call(&pi_gpu_api::mask, static_cast<const pi_gpu_mask *>(&mask));
    }

    // Of a step's only token: what the predictor of all neurons begins with, and the mask that is posted.
    void begin_single(uint32_t first_word, const pi_gpu_post &post) const {
        hidden_units(0, 1);
        if (post.out == nullptr)
            return;
        const pi_gpu_predictor predictor = range(first_word * word_bits, config_.n_ff);
        pi_gpu_mask mask{};
        mask.predictor = &predictor;
        mask.words = predictor.mask;
        mask.post = post;
        stream_.device.call(&pi_gpu_api::mask, static_cast<const pi_gpu_mask *>(&mask));
    }

  private:
    // The hidden units of a few tokens.
    void hidden_units(uint32_t begin, uint32_t n_tokens) const {
        const Matrix &fc1 = layer_.predictor_fc1;
        const float *residual = args_.residual + uint64_t{begin} * config_.n_embd;
        pi_gpu_product first = product(stream_.rows(fc1, 0, padded_rank(fc1.n_rows)), buffers_.hidden);
        first.relu = 1;
        stream_.device.call(&pi_gpu_api::multiply, static_cast<const pi_gpu_product *>(&first), 1u, residual,
                            n_tokens, nullptr);
    }

    const GpuStream &stream_;
    const FfnArgs &args_;
    const LayerWeights &layer_;
    const ModelConfig &config_;
    const GpuFfnBuffers &buffers_;
};

class Ffn {
  public:
    Ffn(GpuStream &stream, const FfnArgs &args, const NeuronRows &rows)
        : stream_(stream), device_(stream.device), args_(args), rows_(rows), config_(*args.config),
          n_(args.neuron_end - args.neuron_begin), buffers_(stream.ffn), norm_(stream.norm(args.norm)) {}

    // Every neuron of every token of the range.
    void dense(uint32_t begin, uint32_t n_tokens) {
        const pi_gpu_product products[] = {product(rows_.gate, buffers_.gate),
                                           product(rows_.up, buffers_.up)};
        device_.call(&pi_gpu_api::multiply, products, 2u, input(begin), n_tokens, norm());
        const bool masked = is_masked(args_, begin);
        if (masked)
            device_.call(&pi_gpu_api::hide, mask(begin), mask_words(config_), n_tokens, n_, buffers_.gate,
                         buffers_.counts);
        const bool relu = config_.activation == Activation::relu;
        const uint64_t n = uint64_t{n_tokens} * n_;
        const bool counted = relu && args_.modes[begin] != PI_FFN_DENSE;
        device_.call(&pi_gpu_api::gated, static_cast<uint32_t>(config_.activation),
                     config_.activation_threshold, static_cast<const float *>(buffers_.up), n, buffers_.gate,
                     counted ? buffers_.counts + 1 : nullptr);
        args_.counts->total += n;
        args_.counts->guessed += masked ? 0 : n;
        args_.counts->active += counted ? 0 : n;
        down(begin, n_tokens);
    }

    // One token: gates, of the neurons that its mask names if it has one, then up and down of those that
    // fire.
    void single(uint32_t token) {
        pi_gpu_neurons of = neurons_of(token);
        if (is_masked(args_, token))
            of.mask = mask(token);
        device_.call(&pi_gpu_api::neurons, static_cast<const pi_gpu_neurons *>(&of));
        down(token, 1);
    }

    // The same of a step's only token, whose neurons the predictor names meanwhile.
    void predicted_single() {
        const pi_gpu_predictor predictor =
            Predictor(stream_, args_).range(args_.neuron_begin, args_.neuron_end);
        pi_gpu_neurons of = neurons_of(0);
        of.predictor = &predictor;
        device_.call(&pi_gpu_api::neurons, static_cast<const pi_gpu_neurons *>(&of));
        down(0, 1);
    }

  private:
    // What is asked of a token's neurons, but for a mask; counts of what the device does not count.
    pi_gpu_neurons neurons_of(uint32_t token) {
        const bool masked = is_masked(args_, token), is_dense = args_.modes[token] == PI_FFN_DENSE;
        args_.counts->total += n_;
        args_.counts->guessed += masked ? 0 : n_;
        args_.counts->active += is_dense ? n_ : 0;
        pi_gpu_neurons of{};
        of.gate = rows_.gate;
        of.up = rows_.up;
        of.x = input(token);
        of.norm = norm();
        of.activation = static_cast<uint32_t>(config_.activation);
        of.threshold = config_.activation_threshold;
        of.n_masked = masked ? buffers_.counts : nullptr;
        of.n_active = is_dense ? nullptr : buffers_.counts + 1;
        of.out = buffers_.gate;
        return of;
    }

    // The token's, from the first neuron on.
    const uint32_t *mask(uint32_t token) const {
        return buffers_.mask + uint64_t{token} * mask_words(config_) + args_.neuron_begin / word_bits;
    }
    const pi_gpu_norm *norm() const { return norm_ ? &*norm_ : nullptr; }
    const float *input(uint32_t token) const {
        return (norm_ ? args_.residual : args_.normed) + uint64_t{token} * config_.n_embd;
    }

    // Down of the activations [n_tokens, n] in buffers_.gate, which are recorded.
    void down(uint32_t begin, uint32_t n_tokens) {
        for (uint32_t t = 0; t < n_tokens; ++t)
            record(begin + t, buffers_.gate + uint64_t{t} * n_);
        const uint32_t add = args_.add_to == nullptr ? 0 : 1;
        float *out = (add == 0 ? args_.out : args_.add_to) + uint64_t{begin} * config_.n_embd;
        const float *activations = buffers_.gate;
        if (config_.sparse_layout) {
            device_.call(&pi_gpu_api::multiply_transposed, &rows_.down, activations, n_tokens, add, out);
        } else {
            const pi_gpu_product down = product(rows_.down, out, add);
            device_.call(&pi_gpu_api::multiply, &down, 1u, activations, n_tokens, nullptr);
        }
    }

    // Neurons whose activation is not 0, into the caller's record: whole bytes, which no other range shares.
    void record(uint32_t token, const float *activations) {
        if (args_.fired == nullptr)
            return;
        const uint64_t n_bytes = (n_ + 7) / 8;
        uint64_t *words = buffers_.words + token * ((n_ + 63) / 64);
        device_.call(&pi_gpu_api::zero, static_cast<void *>(words), (n_ + 63) / 64 * sizeof(uint64_t));
        device_.call(&pi_gpu_api::record, activations, n_, words);
        auto *host = reinterpret_cast<uint8_t *>(args_.fired + token * args_.fired_stride);
        device_.call(&pi_gpu_api::download, static_cast<const void *>(words), n_bytes,
                     static_cast<void *>(host + args_.neuron_begin / 8));
    }

    GpuStream &stream_;
    const GpuDevice &device_;
    const FfnArgs &args_;
    const NeuronRows &rows_;
    const ModelConfig &config_;
    const uint32_t n_;
    const GpuFfnBuffers &buffers_;
    const std::optional<pi_gpu_norm> norm_;
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

void gpu_predict(GpuStream &stream, const FfnArgs &args, uint32_t first_word, const pi_gpu_post &post) {
    const Predictor predictor(stream, args);
    if (is_lone(args))
        return predictor.begin_single(first_word, post);
    const auto same = [&](uint32_t a, uint32_t b) { return is_masked(args, a) == is_masked(args, b); };
    for_runs(args.n_tokens, GpuFfnBuffers::predicted_together, same, [&](uint32_t begin, uint32_t end) {
        if (is_masked(args, begin))
            predictor.mask(begin, end - begin, first_word, post);
    });
}

void gpu_ffn_range(GpuStream &stream, const FfnArgs &args, const NeuronRows &rows) {
    Ffn ffn(stream, args, rows);
    stream.counts = args.counts;
    if (is_lone(args))
        return ffn.predicted_single();
    const auto same = [&](uint32_t a, uint32_t b) { return args.modes[a] == args.modes[b]; };
    for_runs(args.n_tokens, args.n_tokens, same, [&](uint32_t begin, uint32_t end) {
        const uint32_t mode = args.modes[begin];
        const uint32_t few = mode == PI_FFN_PREDICTED ? masked_tokens
                             : mode == PI_FFN_EXACT   ? sparse_tokens
                                                      : 1;
        if (end - begin > few)
            return ffn.dense(begin, end - begin);
        for (uint32_t token = begin; token < end; ++token)
            ffn.single(token);
    });
}

void gpu_ffn(GpuStream &stream, const FfnArgs &args) {
    gpu_predict(stream, args, 0, {});
    gpu_ffn_range(stream, args,
                  stream.neurons(*args.layer, *args.config, args.neuron_begin, args.neuron_end));
}

} // namespace pi
